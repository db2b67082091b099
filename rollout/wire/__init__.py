"""The wire: messages, their binary form, and the only code that touches sockets."""
