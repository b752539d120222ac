"""Who belongs to the job and who leads: a state machine without sockets, clock or threads.

`machine` takes events and gives effects (`events`), `leading` is the part that only the leader plays,
`roster` has the tree by which messages travel and the rule of who may go on, `messages` what members say.
"""
