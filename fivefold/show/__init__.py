"""Print and draw it: tables, charts, pages of text. No torch.

table · compare · comparison · whole_run · search · ratios · published · numerics · doctor · rehearsal · stages · grid
reading · budget · interval · run_folder · traced               time by cause; what to expect; what a run, a trace left
charts · published_charts · pipeline · memory · trace pictures, Perfetto
html · elements · svg · report                        records as HTML, for notebooks; pictures in it; files of it
trace_report · explanation · sweep/                   profiler traces; failures; a sweep's rows: pages and pictures
progress                                              bars on a terminal
"""
