"""The commands, a module each: they read a request, call functions and print. No logic."""
