------------------------------ MODULE Ordering ------------------------------
(* Ordered messages while partitions are split, merged and moved, as docs/ORDERING.md describes it. TLC checks the invariants at the end of
   this module.

   A key stands for its logical partition. A physical partition is a committed log (Replication.tla is about how a broker group has one) and
   what its master accepted and did not commit yet. There is one producer and one group; `unknown` is "resend", the gate is "lanes".

   Left out, because they do not concern order or are tested elsewhere: time, retention, replays of parked keys, sessions of producers,
   resets. *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS
    Keys, Consumers, Nobody,
    MaxMessages,   \* limits of the model: messages of each key,
    MaxPartition,  \* physical partitions ever,
    MaxFences,     \* partitions that may be out of reach,
    MaxToken,      \* grants of each lane,
    MaxParked      \* keys that may be parked

Partitions == 1..MaxPartition

VARIABLES
    routes,        \* the coordination store: every version; which partition holds which key
    change,        \* the change under way: its phase, its sources, the next route
    fences,        \* partitions that the store has closed
    logs,          \* committed: messages of keys, and the command message at the end
    accepted,      \* by the partition's master, neither committed nor answered
    up,            \* whether the partition's group has a master that can commit and is heard
    lease,         \* whether the master may accept messages
    known,         \* the version of the route that the producer knows
    waiting,       \* of each key: messages that the producer has not sent, or has to send again
    outstanding,   \* of each partition: the producer's stream of messages without an answer
    made,          \* of each key: how many messages the application has sent
    acked,         \* messages that were acknowledged to the application
    frontier,      \* the version in which the group reads each key
    done,          \* of each partition and key: everything up to this position is done
    lanes,         \* of each partition and key: who has the lane, and the number of the grant
    hands,         \* of each consumer and key: the message that it has, with the token of the grant
    seen,          \* messages that a handler of the group has seen
    overtaken,     \* whether the group saw a message for the first time after a newer one of its key, or after an older one was set aside
    parked,        \* of each partition and key: whether the key is parked there
    aside          \* messages that were set aside with their keys

store == <<routes, change, fences>>
brokers == <<logs, accepted, up, lease>>
producer == <<known, waiting, outstanding, made, acked>>
parking == <<parked, aside>>
group == <<frontier, done, lanes, hands, seen, overtaken, parking>>
vars == <<store, brokers, producer, group>>

Message == [key : Keys, number : 1..MaxMessages]
Command == [key |-> Nobody, number |-> 0]
NoChange == [phase |-> "none", sources |-> {}, next |-> <<>>]
Empty == [pos |-> 0]
Elements(sequence) == {sequence[i] : i \in DOMAIN sequence}
Least(a, b) == IF a < b THEN a ELSE b
OfKey(sequence, key) == SelectSeq(sequence, LAMBDA each : each.key = key)
IsSealed(pp) == Command \in Elements(logs[pp])
Latest == Len(routes)
UsedPartitions == UNION {{routes[v][k] : k \in Keys} : v \in 1..Latest} \union (IF change.phase = "none" THEN {} ELSE {change.next[k] : k \in Keys})

Begin(route) ==
    /\ routes = <<route>>
    /\ change = NoChange
    /\ fences = {}
    /\ logs = [pp \in Partitions |-> <<>>]
    /\ accepted = [pp \in Partitions |-> <<>>]
    /\ up = [pp \in Partitions |-> TRUE]
    /\ lease = [pp \in Partitions |-> TRUE]
    /\ known = 1
    /\ waiting = [k \in Keys |-> <<>>]
    /\ outstanding = [pp \in Partitions |-> <<>>]
    /\ made = [k \in Keys |-> 0]
    /\ acked = {}
    /\ frontier = [k \in Keys |-> 1]
    /\ done = [pp \in Partitions |-> [k \in Keys |-> 0]]
    /\ lanes = [pp \in Partitions |-> [k \in Keys |-> [holder |-> Nobody, token |-> 0]]]
    /\ hands = [c \in Consumers |-> [k \in Keys |-> Empty]]
    /\ seen = {}
    /\ overtaken = FALSE
    /\ parked = [pp \in Partitions |-> [k \in Keys |-> FALSE]]
    /\ aside = {}

Init == Begin([k \in Keys |-> 1])

------------------------------------------------------------------------------
(* A change: prepare, seal every source, publish. Each step is one transaction of the store or one entry of a log. *)

Moved(keys) == {pp \in Partitions : \E k \in keys : routes[Latest][k] = pp}

(* The keys of whole partitions go to one new partition, or each to its own. *)
Prepare(keys, next) ==
    /\ change.phase = "none"
    /\ \A k \in Keys : routes[Latest][k] \in Moved(keys) => k \in keys
    /\ \A k \in Keys \ keys : next[k] = routes[Latest][k]
    /\ \A k \in keys : next[k] \notin UsedPartitions
    /\ change' = [phase |-> "prepared", sources |-> Moved(keys), next |-> next]
    /\ UNCHANGED <<routes, fences, brokers, producer, group>>

(* The numbers that new partitions get in the model: the lowest ones. *)
Lowest(keys) == 1..Least(MaxPartition, Cardinality(UsedPartitions) + Cardinality(keys))

(* The source's master appends the command message after everything that it has accepted. *)
Seal(pp) ==
    /\ change.phase = "prepared"
    /\ pp \in change.sources
    /\ up[pp]
    /\ lease[pp]
    /\ accepted[pp] = <<>>
    /\ ~IsSealed(pp)
    /\ logs' = [logs EXCEPT ![pp] = Append(@, Command)]
    /\ UNCHANGED <<store, accepted, up, lease, producer, group>>

(* The group is out of reach, and its master's lease has ended. The partition may be sealed already, if nobody heard of it. *)
Fence(pp) ==
    /\ change.phase = "prepared"
    /\ pp \in change.sources
    /\ ~lease[pp]
    /\ fences' = fences \union {pp}
    /\ UNCHANGED <<routes, change, brokers, producer, group>>

AllClosed ==
    /\ change.phase = "prepared"
    /\ \A pp \in change.sources : IsSealed(pp) \/ pp \in fences
    /\ change' = [change EXCEPT !.phase = "sealed"]
    /\ UNCHANGED <<routes, fences, brokers, producer, group>>

Publish ==
    /\ change.phase = "sealed"
    /\ routes' = Append(routes, change.next)
    /\ change' = NoChange
    /\ UNCHANGED <<fences, brokers, producer, group>>

------------------------------------------------------------------------------
(* Brokers. *)

(* The master takes the messages of a stream one after the other, each once: its batches are numbered without gaps. *)
NextOf(pp) ==
    LET stored == Elements(logs[pp]) \union Elements(accepted[pp])
        new == SelectSeq(outstanding[pp], LAMBDA each : each \notin stored)
    IN IF new = <<>> THEN {} ELSE {Head(new)}

Accept(pp) ==
    /\ lease[pp]
    /\ ~IsSealed(pp)
    /\ \E m \in NextOf(pp) : accepted' = [accepted EXCEPT ![pp] = Append(@, m)]
    /\ UNCHANGED <<store, logs, up, lease, producer, group>>

Commit(pp) ==
    /\ up[pp]
    /\ accepted[pp] # <<>>
    /\ logs' = [logs EXCEPT ![pp] = Append(@, Head(accepted[pp]))]
    /\ accepted' = [accepted EXCEPT ![pp] = Tail(@)]
    /\ UNCHANGED <<store, up, lease, producer, group>>

GoAway(pp) ==
    /\ Cardinality({p \in Partitions : ~up[p]} \union fences) < MaxFences
    /\ pp \in UsedPartitions
    /\ up[pp]
    /\ up' = [up EXCEPT ![pp] = FALSE]
    /\ UNCHANGED <<store, logs, accepted, lease, producer, group>>

LoseLease(pp) ==
    /\ ~up[pp]
    /\ lease[pp]
    /\ lease' = [lease EXCEPT ![pp] = FALSE]
    /\ UNCHANGED <<store, logs, accepted, up, producer, group>>

(* A group that is back may commit what its lost master accepted. With the lease it lists the fences, and appends the missing command
   message before it accepts anything. *)
ComeBack(pp) ==
    /\ ~up[pp]
    /\ up' = [up EXCEPT ![pp] = TRUE]
    /\ lease' = [lease EXCEPT ![pp] = TRUE]
    /\ \E kept \in 0..Len(accepted[pp]) :
        logs' = [logs EXCEPT ![pp] = @ \o SubSeq(accepted[pp], 1, kept)
                                       \o IF pp \in fences /\ ~IsSealed(pp) THEN <<Command>> ELSE <<>>]
    /\ accepted' = [accepted EXCEPT ![pp] = <<>>]
    /\ UNCHANGED <<store, producer, group>>

------------------------------------------------------------------------------
(* The producer. *)

Make(k) ==
    /\ made[k] < MaxMessages
    /\ made' = [made EXCEPT ![k] = @ + 1]
    /\ waiting' = [waiting EXCEPT ![k] = Append(@, [key |-> k, number |-> made[k] + 1])]
    /\ UNCHANGED <<store, brokers, known, outstanding, acked, group>>

(* A message goes to its partition once the outcome of the key's earlier messages on other partitions is known. *)
Send(k) ==
    LET pp == routes[known][k] IN
    /\ waiting[k] # <<>>
    /\ \A other \in Partitions \ {pp} : OfKey(outstanding[other], k) = <<>>
    /\ outstanding' = [outstanding EXCEPT ![pp] = Append(@, Head(waiting[k]))]
    /\ waiting' = [waiting EXCEPT ![k] = Tail(@)]
    /\ UNCHANGED <<store, brokers, known, made, acked, group>>

Answered(pp) ==
    /\ outstanding[pp] # <<>>
    /\ Head(outstanding[pp]) \in Elements(logs[pp])
    /\ acked' = acked \union {Head(outstanding[pp])}
    /\ outstanding' = [outstanding EXCEPT ![pp] = Tail(@)]
    /\ UNCHANGED <<store, brokers, known, waiting, made, group>>

SendAgain(pp, messages) ==
    /\ waiting' = [k \in Keys |-> OfKey(messages, k) \o waiting[k]]
    /\ outstanding' = [outstanding EXCEPT ![pp] = <<>>]

(* A sealed partition says of each batch whether it is stored. *)
Refused(pp) ==
    /\ IsSealed(pp)
    /\ up[pp]
    /\ outstanding[pp] # <<>>
    /\ Head(outstanding[pp]) \notin Elements(logs[pp])
    /\ SendAgain(pp, outstanding[pp])
    /\ UNCHANGED <<store, brokers, known, made, acked, group>>

(* The route no longer has the partition, which is fenced and does not answer: the outcome is unknown, and the messages are sent again. *)
GiveUp(pp) ==
    /\ pp \in fences
    /\ \A k \in Keys : routes[known][k] # pp
    /\ outstanding[pp] # <<>>
    /\ SendAgain(pp, outstanding[pp])
    /\ UNCHANGED <<store, brokers, known, made, acked, group>>

LearnRoute ==
    /\ known < Latest
    /\ known' = known + 1
    /\ UNCHANGED <<store, brokers, waiting, outstanding, made, acked, group>>

------------------------------------------------------------------------------
(* The group. *)

Reads(k) == routes[frontier[k]][k]

(* A consumer reads the group's frontier, and asks a broker for the lane later: by then the group may have gone on. *)
Attach(c, k, pp) ==
    /\ pp \in {routes[v][k] : v \in 1..frontier[k]}
    /\ lanes[pp][k].holder = Nobody
    /\ lanes[pp][k].token < MaxToken
    /\ lanes' = [lanes EXCEPT ![pp][k] = [holder |-> c, token |-> @.token + 1]]
    /\ UNCHANGED <<store, brokers, producer, frontier, done, hands, seen, overtaken, parking>>

(* The lease of the lane ended; its consumer need not know it. *)
Revoke(pp, k) ==
    /\ lanes[pp][k].holder # Nobody
    /\ lanes' = [lanes EXCEPT ![pp][k].holder = Nobody]
    /\ UNCHANGED <<store, brokers, producer, frontier, done, hands, seen, overtaken, parking>>

Of(pp, k) == {pos \in DOMAIN logs[pp] : logs[pp][pos] = Command \/ logs[pp][pos].key = k}
Rest(pp, k) == {pos \in Of(pp, k) : pos > done[pp][k]}
First(positions) == CHOOSE pos \in positions : \A other \in positions : pos <= other

(* The consumer knows whether the key is parked. *)
Pull(c, pp, k) ==
    /\ hands[c][k] = Empty
    /\ lanes[pp][k].holder = c
    /\ Rest(pp, k) # {}
    /\ hands' = [hands EXCEPT ![c][k] = [pos |-> First(Rest(pp, k)), pp |-> pp, token |-> lanes[pp][k].token, aside |-> parked[pp][k]]]
    /\ UNCHANGED <<store, brokers, producer, frontier, done, lanes, seen, overtaken, parking>>

Handle(c, k) ==
    LET m == logs[hands[c][k].pp][hands[c][k].pos] IN
    /\ hands[c][k] # Empty
    /\ m # Command
    /\ m \notin seen
    /\ ~hands[c][k].aside
    /\ seen' = seen \union {m}
    /\ overtaken' = \/ overtaken
                    \/ \E other \in seen : other.key = m.key /\ other.number > m.number
                    \/ \E other \in aside \ seen : other.key = m.key /\ other.number < m.number
    /\ UNCHANGED <<store, brokers, producer, frontier, done, lanes, hands, parking>>

(* The next message of the key was pulled too. A consumer does not wait for the verdict to count, nor does it know that the lane is lost. *)
GoOn(c, k) ==
    LET h == hands[c][k]
        later == {pos \in Of(h.pp, k) : pos > h.pos}
    IN
    /\ h # Empty
    /\ logs[h.pp][h.pos] \in seen
    /\ later # {}
    /\ hands' = [hands EXCEPT ![c][k].pos = First(later)]
    /\ UNCHANGED <<store, brokers, producer, frontier, done, lanes, seen, overtaken, parking>>

(* The verdict counts with the token of the present grant only, for the message and those of the key before it. *)
Settle(c, k) ==
    LET h == hands[c][k] IN
    /\ h # Empty
    /\ logs[h.pp][h.pos] = Command \/ (logs[h.pp][h.pos] \in seen /\ ~h.aside)
    /\ lanes[h.pp][k] = [holder |-> c, token |-> h.token]
    /\ done' = [done EXCEPT ![h.pp][k] = h.pos]
    /\ hands' = [hands EXCEPT ![c][k] = Empty]
    /\ UNCHANGED <<store, brokers, producer, frontier, lanes, seen, overtaken, parking>>

(* The handler failed, or the key is parked already: the message is set aside, and those of the key that follow will be. *)
Park(c, k) ==
    LET h == hands[c][k] IN
    /\ h # Empty
    /\ logs[h.pp][h.pos] # Command
    /\ lanes[h.pp][k] = [holder |-> c, token |-> h.token]
    /\ parked[h.pp][k] \/ Cardinality({key \in Keys : \E pp \in Partitions : parked[pp][key]} \union {k}) <= MaxParked
    /\ parked' = [parked EXCEPT ![h.pp][k] = TRUE]
    /\ aside' = aside \union {logs[h.pp][h.pos]}
    /\ done' = [done EXCEPT ![h.pp][k] = h.pos]
    /\ hands' = [hands EXCEPT ![c][k] = Empty]
    /\ UNCHANGED <<store, brokers, producer, frontier, lanes, seen, overtaken>>

Drop(c, k) ==
    /\ hands[c][k] # Empty
    /\ hands' = [hands EXCEPT ![c][k] = Empty]
    /\ UNCHANGED <<store, brokers, producer, frontier, done, lanes, seen, overtaken, parking>>

(* Nothing has to be done in a partition that never had a message. *)
IsFinished(pp, k) == IsSealed(pp) /\ (done[pp][k] = Len(logs[pp]) \/ logs[pp] = <<Command>>)

(* Before the group leaves a partition, the keys that are parked there are parked in the next one. Its reader attaches again. *)
Inherit(k) ==
    LET pp == routes[frontier[k] + 1][k] IN
    /\ frontier[k] < Latest
    /\ IsFinished(Reads(k), k)
    /\ parked[Reads(k)][k]
    /\ ~parked[pp][k]
    /\ parked' = [parked EXCEPT ![pp][k] = TRUE]
    /\ lanes' = [lanes EXCEPT ![pp][k].holder = Nobody]
    /\ UNCHANGED <<store, brokers, producer, frontier, done, hands, seen, overtaken, aside>>

Advance(k) ==
    /\ frontier[k] < Latest
    /\ routes[frontier[k] + 1][k] = Reads(k) \/ IsFinished(Reads(k), k)
    /\ parked[Reads(k)][k] => parked[routes[frontier[k] + 1][k]][k]
    /\ frontier' = [frontier EXCEPT ![k] = @ + 1]
    /\ UNCHANGED <<store, brokers, producer, done, lanes, hands, seen, overtaken, parking>>

------------------------------------------------------------------------------
Next ==
    \/ \E keys \in SUBSET Keys \ {{}} : \E new \in [keys -> Lowest(keys)] :
        Prepare(keys, [k \in Keys |-> IF k \in keys THEN new[k] ELSE routes[Latest][k]])
    \/ AllClosed \/ Publish \/ LearnRoute
    \/ \E pp \in Partitions :
        \/ Seal(pp) \/ Fence(pp) \/ Accept(pp) \/ Commit(pp) \/ GoAway(pp) \/ LoseLease(pp) \/ ComeBack(pp)
        \/ Answered(pp) \/ Refused(pp) \/ GiveUp(pp)
        \/ \E k \in Keys : Revoke(pp, k) \/ \E c \in Consumers : Attach(c, k, pp) \/ Pull(c, pp, k)
    \/ \E k \in Keys : Make(k) \/ Send(k) \/ Inherit(k) \/ Advance(k)
    \/ \E k \in Keys, c \in Consumers : Handle(c, k) \/ GoOn(c, k) \/ Settle(c, k) \/ Park(c, k) \/ Drop(c, k)

Spec == Init /\ [][Next]_vars

------------------------------------------------------------------------------
(* What must be true. *)

(* The group never sees a message that is new to it after a newer one of its key, or while an older one of its key is set aside. *)
Order == ~overtaken

(* A key's messages over all versions, in the order in which a group reads them. *)
RECURSIVE Read(_, _)
Read(k, version) ==
    IF version = 0 THEN <<>>
    ELSE Read(k, version - 1) \o
         IF version > 1 /\ routes[version - 1][k] = routes[version][k] THEN <<>>
         ELSE OfKey(SelectSeq(logs[routes[version][k]], LAMBDA each : each # Command), k)

(* First copies are stored in the order of their numbers. *)
StoredInOrder ==
    \A k \in Keys : LET all == Read(k, Latest) IN
        \A i, j \in DOMAIN all : i < j /\ all[j].number < all[i].number => \E earlier \in 1..(i - 1) : all[earlier] = all[j]

(* A message is stored twice only if its partition was fenced, and never twice in one partition. *)
StoredOnce ==
    /\ \A pp \in Partitions : \A i, j \in DOMAIN logs[pp] : logs[pp][i] = logs[pp][j] => i = j
    /\ fences = {} => \A k \in Keys : LET all == Read(k, Latest) IN \A i, j \in DOMAIN all : all[i] = all[j] => i = j

(* An acknowledged message is where the group will read it. *)
NothingLost == \A m \in acked : m \in Elements(Read(m.key, Latest))

(* What the group has passed, it has seen or set aside. *)
NothingSkipped ==
    \A k \in Keys :
        LET passed == {routes[v][k] : v \in 1..(frontier[k] - 1)} \ {Reads(k)} IN
        /\ \A pp \in passed : \A m \in Elements(logs[pp]) \ {Command} : m.key = k => m \in seen \union aside
        /\ \A pos \in 1..done[Reads(k)][k] : logs[Reads(k)][pos] # Command /\ logs[Reads(k)][pos].key = k => logs[Reads(k)][pos] \in seen \union aside

(* A sealed partition ends with its command message. *)
SealedForEver == \A pp \in Partitions : \A i \in DOMAIN logs[pp] : logs[pp][i] = Command => i = Len(logs[pp])
=============================================================================
