"""Requests as schemas and records, and their answers: shared by the command line, the web page and the Python API.

schema · fields · commands   the base of requests; fields that several have; the request of each command
words · job · machines   numbers with their units; a job of a file, of options over it, of ``--set`` over both; machines
search · across          what a search is asked besides its nouns; one run on several machines, and their prices
playbook · sweep         from tokens to a run file; where a sweep's rows go, and how they are measured
configs                  configs of other software as questions, and what an answer must say of their keys
answers · cases · extras ``ask``'s questions; what is compared; what a missing package is of
"""
