"""Prints and draws: tables, charts, pages of text. No torch.

step_view · grid · table   a view: columns and sections as data; what a terminal prints of them
compare · comparison · search · robust · ratios · numerics · doctor · rehearsal · stages
question · reading · budget · interval · verdict · whole_run · playbook · lengths   what to expect
palette · charts · losses · pipeline · memory · trace · figures/   one style; pictures to paste; Perfetto
html · rows · elements · drawing/ · drawn · report   records as HTML, for notebooks; pictures in pages; files of it
trace_report · explanation · sweep/                   profiler traces; failures; a sweep's rows: pages and pictures
progress                                              bars on a terminal
"""
