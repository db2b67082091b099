"""The bridge as other trainers want it: each module imports one trainer library and is imported by name."""
