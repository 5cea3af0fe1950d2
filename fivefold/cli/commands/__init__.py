"""The commands, one module each: they read a request, call functions and print. No other logic."""
