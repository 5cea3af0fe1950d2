"""The pages: each turns a question into records by ``answers``, and records into HTML by its template.

render · stream       templates, filters, the frame of every page; long work as events
plan · search · ask   one layout; all layouts, streamed; one question
compare · sweep       up to eight variants side by side; the rows of a sweep's file
dryrun · runs         a dry run with its tape; the folder's runs, live
files                 traces, and what a failed run left
learn                 the guide's chapters as HTML, formulas as MathML
"""
