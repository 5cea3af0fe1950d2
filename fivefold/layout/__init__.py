"""The layout: how a step is spread over ranks.

spec · names        the record and its text; words of axes and schedules
pattern             many layouts as one text
legal               why a layout cannot be, in one line
mesh                process groups by axis          sharding · local_weight   which part of which weight lies where
stages · schedule/  layers of pipeline stages; pipeline schedules as tables
spans · trace_file  a step over time, as data; what the ranks of a run did, as files
search_result       what a search found
spans · trace_report  a step over time, as data; what traces of a run say      search_result   what a search found
"""
