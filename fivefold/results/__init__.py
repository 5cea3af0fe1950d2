"""Records that commands return, and that the terminal, the web page and Python show.

search_result                              what a search minimizes; the layouts that it found
comparison                                 layouts compared; the uncertainty of a ratio; a difference by cause
playbook · run_estimate                       a plan from tokens to a run file; days, cost and energy of a run
spans · trace_file · trace_report          a step over time; traces as files; a trace's time, and its prediction
explanation · diagnosis · numerics         why a run failed; memory and FLOPs of a module; precision error
step_comparison · run_folder               predicted next to measured; a run
advice · sweep_row                         advice on a measured step; one layout of a sweep
catalog · outputs                          rows of the catalogs; the JSON of commands that no other record states
balance · reading                          FLOPs per byte of each axis; a third-party config as model, layout and job
"""
