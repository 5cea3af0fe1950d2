"""``fivefold web``: a local page over the verbs of the command line, and ``/api``, their JSON. Loopback only.

app · site · guard · folder    the application; what its routes share; who may ask; which files a request may read
question · answers · controls  what is asked (its URL), as records; answered; the words of a layout as choices
work · worker · runs           short answers in a thread, long ones in processes that can be killed; what runs log
api · pages · rehearsed · serve   the routes; a rehearsal as HTML; the server
book                           the book's chapters as HTML, formulas as MathML
"""
