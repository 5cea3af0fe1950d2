"""The layout: how a step is spread over ranks.

spec · names        the record and its text; words of axes and schedules
pattern             many layouts as one text
legal · search_result · comparison · difference · whole_run · playbook · explanation   why not; what plan found
mesh                process groups by axis          sharding · local_weight   which part of which weight lies where
stages · schedule/  layers of pipeline stages; pipeline schedules as tables
spans · trace_file · trace_report   a step over time, as data; what ranks did, as files; what profiler traces say
"""
