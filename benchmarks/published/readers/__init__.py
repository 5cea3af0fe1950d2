"""One reader per published source: rows of its data file become cases, or are excluded by a rule."""
