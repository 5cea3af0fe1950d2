"""Printing and drawing of results: tables, charts, pages of text. Without torch.

step_view · grid · sections · table        tables and sections of an answer as data; what a terminal prints of them
compare · comparison · search · answers · robust · ratios · numerics · doctor · dry_run · stages · question · reading
budget · interval · run_estimate · playbook · lengths · catalogs      pages of text, one for each result
layout_legend                              the line that explains unusual keywords of layouts
palette · charts · losses · pipeline · memory · trace · figures/             colours; pictures as files; Perfetto traces
html · rows · elements · drawing/ · point_charts · report  HTML for notebooks; pictures in pages; reports
trace_report · explanation · sweep/        profiler traces; failures; a sweep's rows
progress                                   progress bars on a terminal
"""
