"""Print and draw it: tables, charts, pages of text. No torch.

table · compare · search · ratios · published · numerics · doctor · rehearsal · stages · grid   pages and tables
budget                                                                                          time by cause
charts · pipeline · memory · trace                                                              pictures, Perfetto
sweep/                                                                                          a sweep's rows, pictures
progress                                                                                        bars on a terminal
"""
