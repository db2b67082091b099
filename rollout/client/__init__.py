"""The client: one I/O thread per connection, an async and a blocking facade over it."""
