"""`paceline rehearse`: a job of the user is disturbed on purpose, and what its recovery costs is measured.

rehearsal.py    which drills there are, in which order            report.py      the tables, JSON
drill.py        starts the launchers of one drill, strikes        intervals.py   Young, Daly, useful time
job_in_drill.py runs the script in each process, and records      measure.py     lines of processes -> `Recovery`
lines.py        the files of these records                        apart.py       checkpoints go to a folder of the drill
cable.py        two hosts with a link that can be cut
"""
