"""``fivefold web``: a local web page over the commands, and ``/api``, their JSON. It listens on loopback only.

app · site · guard · folder    the application; state shared by its routes; access checks; files a request may read
question · answers · controls  the question (its URL) as records; its answer; keywords and fields of a job as choices
run_config                     the config of a trainer, pasted, which fills in the question
wording                        names of pages and controls, in messages that name options and commands
static_files                   the style sheet with its hash for the policy, and the scripts
copies                         the question as a command line and as Python
work · worker · runs           short answers in a thread, long ones in processes that can be killed; logs of runs
dropped                        files that are dropped on a page
api · pages · serve            the routes; the server
dry_run · files                a dry run, and the files of a run, as HTML
"""
