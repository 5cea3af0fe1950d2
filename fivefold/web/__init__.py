"""``fivefold web``: a local page over the verbs of the command line, and ``/api``, their JSON. Loopback only.

app · site · guard · folder    the application; what its routes share; who may ask; which files a request may read
question · answers · controls  what is asked (its URL), as records; answered; the words of a layout as choices
work · worker                  short answers in a thread, long ones in processes that can be killed
api · pages · drawing · serve  the routes; pictures as SVG; the server
"""
