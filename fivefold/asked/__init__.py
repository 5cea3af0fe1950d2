"""What is asked in words, as records, and answered: the command line, the page and Python ask the same way.

words · job        numbers with their units; a job of a file, of options over it, of ``--set`` over both
search · across    what a search is asked besides its nouns; one run on several machines, and their prices
answers · cases · extras   ``ask``'s questions; what is compared; what a missing package is of
"""
