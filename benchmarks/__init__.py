"""Measurements against the outside: published runs, and the speed of training, search and page."""
