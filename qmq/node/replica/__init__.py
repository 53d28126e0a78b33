"""One replica of a broker group: its log, its part in elections,
and the broker that it becomes as master.
"""
