"""Print and draw it: tables, charts, pages of text. No torch.

table · compare · comparison · search · ratios · published · numerics · doctor · rehearsal · stages · grid: pages
budget · interval                                     time by cause; what to expect
charts · published_charts · pipeline · memory · trace pictures, Perfetto
trace_report · sweep/                                 profiler traces; a sweep's rows: pages and pictures
progress                                              bars on a terminal
"""
