"""`paceline doctor`: looks at hosts before a run, and says what would stop it or slow it down.

    hosts.py          which hosts, and the command that carries the connection to each
    examine.py        the steps, each bounded in time: asks all hosts at the same time (host/agent.py answers)
       facts          host/*.py: each host describes itself                                    -> facts.HostFacts
       connections    each host connects to a port of each other one                           -> facts.Connection
       clocks         exchanges of the time, each bounded by its round trip                    -> facts.Clock
       links          latency and bandwidth of pairs, those of a round at the same time        -> facts.Link
       all-reduce     over gloo, or over the devices' own backend, by size                     -> facts.AllReduce
       folder         files in the shared folder, made by one host and looked for by others    -> facts.FolderUse
    checks/*.py       pure judgements over the facts, one file each                            -> finding.Finding
    report.py         the findings as a table, or as JSON

Nothing is judged while facts are collected, and a check neither measures nor asks: with recorded facts it says the same.
"""
