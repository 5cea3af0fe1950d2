"""The layout: how a step is spread over ranks.

spec · names        the record and its text; words of axes and schedules
pattern             many layouts as one text
legal               why a layout is not valid
mesh                process groups by axis          sharding · local_weight   which part of which weight lies where
stages · schedule/  layers of pipeline stages; pipeline schedules as tables
"""
