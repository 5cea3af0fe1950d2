"""Print and draw it: tables, charts, pages of text. No torch.

table · compare · search · ratios · published · numerics · doctor · rehearsal · stages · grid   pages and tables
budget                                                                                          time by cause
charts · pipeline · memory · trace                                                              pictures, Perfetto
sweep/                                                                                          a sweep's rows, pictures
charts · pipeline · memory · trace · trace_report      pictures, Perfetto; the page and pictures of profiler traces
progress                                                                                        bars on a terminal
"""
