"""Arithmetic word questions with a calculator tool, on a real small model."""
