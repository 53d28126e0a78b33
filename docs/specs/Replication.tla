---------------------------- MODULE Replication ----------------------------
(* The replication of one broker group, as docs/REPLICATION.md describes it: a log by Raft's rules, whose epochs the coordination store
   gives. `replication/qmq_replication` is the product's code. TLC checks the invariants at the end of this module.

   An entry is the epoch and the replica that wrote it: a second writer of an epoch would be seen as another entry.

   Left out, because they do not concern safety or are tested elsewhere: time, polls, Refusal and TakeOver (a replica may campaign or step
   down at any moment), LogReset (retention), flushes (a stored entry may be lost by a power cut at any moment), places in files. *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS
    Replicas,      \* all machines
    FirstVoters,   \* the voters at the beginning; the others may become voters
    MaxEpoch,      \* limits of the model: epochs won,
    MaxLength,     \* entries of a log,
    MaxMessages,   \* messages on their way,
    MaxChanges,    \* changes of the membership,
    MaxKills,      \* kills of processes,
    MaxCuts        \* power cuts of single replicas

VARIABLES
    store,         \* the coordination store: the epoch, the claim to each epoch (its owner, and the voters then), the voters, and the last change
    requests,      \* changes of the membership on their way to the store
    promised,      \* on disk: nothing older is accepted
    log,           \* on disk
    whole,         \* on disk: the replica holds all that it ever acknowledged
    role,          \* "slave", "fencing" or "master"
    commit,        \* a process's commit position
    slave,         \* the slave's part of a process: is its log a prefix of the master's (inStep), the round, the master's commit position
    promises,      \* of a fencing replica: the promises that it has
    view,          \* of a fencing replica and a master: its voters, a pending change, and how much was committed at the last one
    peers,         \* of a master: how far each peer is
    messages,      \* on their way
    committed,     \* what was ever committed: index, entry, and the epoch of the master that committed
    count          \* how often each limited thing has happened

vars == <<store, requests, promised, log, whole, role, commit, slave, promises, view, peers, messages, committed, count>>

NoChange == {}
FreshSlave == [inStep |-> FALSE, round |-> 0, masterCommit |-> 0]
FreshPeer == [inStep |-> FALSE, match |-> 0, next |-> 0, round |-> 0]
NoView == [voters |-> {}, change |-> NoChange, changedAt |-> 0]

Majorities(voters) == {some \in SUBSET voters : 2 * Cardinality(some) > Cardinality(voters)}
LastOf(entries) == IF entries = <<>> THEN [epoch |-> 0, index |-> 0] ELSE [epoch |-> entries[Len(entries)].epoch, index |-> Len(entries)]
EpochAt(entries, index) == IF index = 0 THEN 0 ELSE entries[index].epoch
IsAhead(one, other) == one.epoch > other.epoch \/ (one.epoch = other.epoch /\ one.index > other.index)
Prefix(entries, index) == SubSeq(entries, 1, index)
Least(a, b) == IF a < b THEN a ELSE b
Most(a, b) == IF a > b THEN a ELSE b

(* The last index at which two logs agree, by their epochs alone. *)
Divergence(ours, theirs) ==
    CHOOSE index \in 0..Least(Len(ours), Len(theirs)) :
        /\ EpochAt(ours, index) = EpochAt(theirs, index)
        /\ \A later \in (index + 1)..Least(Len(ours), Len(theirs)) : EpochAt(ours, later) # EpochAt(theirs, later)

Init ==
    /\ store = [epoch |-> 0, claims |-> <<>>, voters |-> FirstVoters, madeIn |-> 0]
    /\ requests = {}
    /\ promised = [r \in Replicas |-> 0]
    /\ log = [r \in Replicas |-> <<>>]
    /\ whole = [r \in Replicas |-> TRUE]
    /\ role = [r \in Replicas |-> "slave"]
    /\ commit = [r \in Replicas |-> 0]
    /\ slave = [r \in Replicas |-> FreshSlave]
    /\ promises = [r \in Replicas |-> <<>>]
    /\ view = [r \in Replicas |-> NoView]
    /\ peers = [r \in Replicas |-> <<>>]
    /\ messages = {}
    /\ committed = {}
    /\ count = [changes |-> 0, kills |-> 0, cuts |-> 0]

------------------------------------------------------------------------------
(* Roles. *)

NoLongerMaster(r) ==
    /\ role' = [role EXCEPT ![r] = "slave"]
    /\ promises' = [promises EXCEPT ![r] = <<>>]
    /\ view' = [view EXCEPT ![r] = NoView]
    /\ peers' = [peers EXCEPT ![r] = <<>>]

(* A promise is on disk before anybody hears of it. *)
PromiseEpoch(r, epoch) ==
    /\ promised' = [promised EXCEPT ![r] = epoch]
    /\ slave' = [slave EXCEPT ![r] = FreshSlave]

Claim(r) == [last |-> LastOf(log[r]), whole |-> whole[r]]

(* A compare-and-swap of the epoch and the membership gives the epoch one owner, who uses the membership of that moment. *)
GiveEpoch(r) ==
    /\ store.epoch < MaxEpoch
    /\ r \in store.voters
    /\ store' = [store EXCEPT !.epoch = @ + 1, !.claims = Append(@, [owner |-> r, voters |-> store.voters])]
    /\ UNCHANGED <<requests, promised, log, whole, role, commit, slave, promises, view, peers, messages, committed, count>>

(* The owner learns it later, or never. A master may step down first; nothing depends on whether it does. *)
WinEpoch(r, epoch) ==
    /\ store.claims[epoch].owner = r
    /\ epoch > promised[r]
    /\ PromiseEpoch(r, epoch)
    /\ role' = [role EXCEPT ![r] = "fencing"]
    /\ promises' = [promises EXCEPT ![r] = (r :> Claim(r))]
    /\ view' = [view EXCEPT ![r] = [voters |-> store.claims[epoch].voters, change |-> NoChange, changedAt |-> 0]]
    /\ peers' = [peers EXCEPT ![r] = <<>>]
    /\ UNCHANGED <<store, requests, log, whole, commit, messages, committed, count>>

(* The promises that count: those of whole voters; those of all voters once all have promised. *)
Judges(r) ==
    LET found == view[r].voters \intersect DOMAIN promises[r]
    IN IF found = view[r].voters THEN found ELSE {p \in found : promises[r][p].whole}

BecomeMaster(r) ==
    /\ role[r] = "fencing"
    /\ Len(log[r]) < MaxLength
    /\ Judges(r) \in Majorities(view[r].voters)
    /\ \A p \in Judges(r) : ~IsAhead(promises[r][p].last, LastOf(log[r]))
    /\ role' = [role EXCEPT ![r] = "master"]
    /\ promises' = [promises EXCEPT ![r] = <<>>]
    /\ whole' = [whole EXCEPT ![r] = TRUE]
    /\ peers' = [peers EXCEPT ![r] = [p \in Replicas \ {r} |-> FreshPeer]]
    /\ log' = [log EXCEPT ![r] = Append(@, [epoch |-> promised[r], writer |-> r])]  \* the barrier
    /\ UNCHANGED <<store, requests, promised, commit, slave, view, messages, committed, count>>

------------------------------------------------------------------------------
(* Messages. One that is received may come once more; one that is lost is never received. *)

Replace(received, answers) == messages' \in {(messages \ {received}) \union answers, messages \union answers}

(* A request for promises is not a message of the model: it may reach a replica at any moment after its epoch was won. *)
AnswerPromiseRequest(r, epoch) ==
    /\ epoch >= promised[r]
    /\ store.claims[epoch].owner # r
    /\ IF epoch > promised[r]
       THEN PromiseEpoch(r, epoch) /\ NoLongerMaster(r)
       ELSE UNCHANGED <<promised, slave, role, promises, view, peers>>
    /\ messages' = messages \union {[kind |-> "Promise", from |-> r, to |-> store.claims[epoch].owner, epoch |-> epoch, claim |-> Claim(r)]}
    /\ UNCHANGED <<store, requests, log, whole, commit, committed, count>>

TakePromise(m) ==
    LET r == m.to IN
    /\ m.kind = "Promise"
    /\ role[r] = "fencing"
    /\ m.epoch = promised[r]
    /\ promises' = [promises EXCEPT ![r] = (m.from :> m.claim) @@ @]
    /\ Replace(m, {})
    /\ UNCHANGED <<store, requests, promised, log, whole, role, commit, slave, view, peers, committed, count>>

(* Entries of clients. *)
Write(r) ==
    /\ role[r] = "master"
    /\ Len(log[r]) < MaxLength
    /\ log' = [log EXCEPT ![r] = Append(@, [epoch |-> promised[r], writer |-> r])]
    /\ UNCHANGED <<store, requests, promised, whole, role, commit, slave, promises, view, peers, messages, committed, count>>

AppendMessage(r, p, prev, last, cut, round) ==
    [kind |-> "Append", from |-> r, to |-> p, epoch |-> promised[r], prev |-> prev, prevEpoch |-> EpochAt(log[r], prev),
     entries |-> SubSeq(log[r], prev + 1, last), commit |-> commit[r], cut |-> cut, round |-> round]

(* A peer in step gets some of what follows, or nothing; another one gets an Append without entries, and answers whether its log ends there. *)
Send(r, p) ==
    /\ role[r] = "master"
    /\ p # r
    /\ LET peer == peers[r][p] IN
       IF peer.inStep
       THEN \E last \in (peer.next - 1)..Len(log[r]) :
            /\ messages' = messages \union {AppendMessage(r, p, peer.next - 1, last, FALSE, peer.round)}
            /\ peers' = [peers EXCEPT ![r][p].next = last + 1]
       ELSE /\ messages' = messages \union {AppendMessage(r, p, Len(log[r]), Len(log[r]), FALSE, peer.round)}
            /\ UNCHANGED peers
    /\ UNCHANGED <<store, requests, promised, log, whole, role, commit, slave, promises, view, committed, count>>

(* What a slave does with an Append: its log, whether it is in step, and the kind of the answer. *)
Continued(r, state, m) ==
    LET last == Len(log[r])
        end == m.prev + Len(m.entries)
        taken == [log |-> Prefix(log[r], m.prev) \o m.entries, inStep |-> TRUE, answer |-> "Ack"]
        refused == [log |-> log[r], inStep |-> state.inStep, answer |-> "Mismatch"]
    IN IF state.inStep
       THEN IF m.prev = last THEN taken
            ELSE IF end <= last THEN [log |-> log[r], inStep |-> TRUE, answer |-> "OldAck"] ELSE refused
       ELSE IF m.prev <= last /\ EpochAt(log[r], m.prev) = m.prevEpoch /\ (m.cut \/ m.prev = last) /\ m.prev >= commit[r] THEN taken
       ELSE refused

IsWhole(r, state, entries) ==
    /\ state.masterCommit > 0
    /\ Len(entries) >= state.masterCommit
    /\ EpochAt(entries, state.masterCommit) = promised'[r]

AnswerAppend(m) ==
    LET r == m.to
        before == IF m.epoch > promised[r] THEN FreshSlave ELSE slave[r]
        result == Continued(r, before, m)
        round == Most(before.round, m.round)
        known == IF result.answer = "Ack" THEN Most(before.masterCommit, m.commit) ELSE before.masterCommit
        after == [inStep |-> result.inStep, round |-> round, masterCommit |-> known]
        reply == IF result.answer = "Mismatch"
                 THEN [kind |-> "Mismatch", from |-> r, to |-> m.from, epoch |-> m.epoch, round |-> m.round, log |-> log[r]]
                 ELSE [kind |-> "Ack", from |-> r, to |-> m.from, epoch |-> m.epoch, round |-> round, stored |-> Len(result.log)]
    IN
    /\ m.kind = "Append"
    /\ m.epoch >= promised[r]
    /\ promised' = [promised EXCEPT ![r] = m.epoch]
    /\ IF role[r] # "slave" THEN NoLongerMaster(r) ELSE UNCHANGED <<role, promises, view, peers>>
    /\ slave' = [slave EXCEPT ![r] = after]
    /\ log' = [log EXCEPT ![r] = result.log]
    /\ commit' = [commit EXCEPT ![r] = IF result.answer = "Ack" THEN Most(@, Least(m.commit, Len(result.log))) ELSE @]
    /\ whole' = [whole EXCEPT ![r] = @ \/ (result.answer = "Ack" /\ IsWhole(r, after, result.log))]
    /\ Replace(m, {reply})
    /\ UNCHANGED <<store, requests, committed, count>>

(* A slave in step may report again what it stores. *)
Report(r) ==
    /\ role[r] = "slave"
    /\ slave[r].inStep
    /\ messages' = messages \union
        {[kind |-> "Ack", from |-> r, to |-> store.claims[promised[r]].owner, epoch |-> promised[r],
          round |-> slave[r].round, stored |-> Len(log[r])]}
    /\ UNCHANGED <<store, requests, promised, log, whole, role, commit, slave, promises, view, peers, committed, count>>

TakeAck(m) ==
    LET r == m.to IN
    /\ m.kind = "Ack"
    /\ role[r] = "master"
    /\ m.epoch = promised[r]
    /\ m.round = peers[r][m.from].round
    /\ LET peer == peers[r][m.from] IN
       peers' = [peers EXCEPT ![r][m.from] =
                 [peer EXCEPT !.match = Most(@, m.stored), !.inStep = TRUE, !.next = IF peer.inStep THEN @ ELSE m.stored + 1]]
    /\ Replace(m, {})
    /\ UNCHANGED <<store, requests, promised, log, whole, role, commit, slave, promises, view, committed, count>>

(* Each Mismatch begins a round, and earlier acknowledgements do not count in it. *)
TakeMismatch(m) ==
    LET r == m.to
        same == Divergence(log[r], m.log)
        cut == same < Len(m.log)
    IN
    /\ m.kind = "Mismatch"
    /\ role[r] = "master"
    /\ m.epoch = promised[r]
    /\ m.round = peers[r][m.from].round
    /\ peers' = [peers EXCEPT ![r][m.from] =
                 [inStep |-> ~cut, match |-> Least(@.match, Len(m.log)), next |-> IF cut THEN 0 ELSE same + 1, round |-> m.round + 1]]
    /\ Replace(m, {AppendMessage(r, m.from, same, same, cut, m.round + 1)})
    /\ UNCHANGED <<store, requests, promised, log, whole, role, commit, slave, promises, view, committed, count>>

------------------------------------------------------------------------------
(* Committing. *)

Stored(r, p) == IF p = r THEN Len(log[r]) ELSE peers[r][p].match
IsStored(r, voters, index) == {p \in voters : Stored(r, p) >= index} \in Majorities(voters)
IsStoredByMajority(r, index) ==
    /\ IsStored(r, view[r].voters, index)
    /\ view[r].change # NoChange => IsStored(r, view[r].change, index)

MayCommit(r, index) == EpochAt(log[r], index) = promised[r]

Commit(r, index) ==
    /\ role[r] = "master"
    /\ index > commit[r]
    /\ IsStoredByMajority(r, index)
    /\ MayCommit(r, index)
    /\ commit' = [commit EXCEPT ![r] = index]
    /\ committed' = committed \union
        {[index |-> i, entry |-> log[r][i], epoch |-> promised[r]] :
            i \in {i \in 1..index : \A c \in committed : c.index # i \/ c.entry # log[r][i]}}
    /\ UNCHANGED <<store, requests, promised, log, whole, role, slave, promises, view, peers, messages, count>>

------------------------------------------------------------------------------
(* Membership. *)

IsServing(r) == commit[r] > 0 /\ EpochAt(log[r], commit[r]) = promised[r]

MayChange(r) ==
    /\ view[r].change = NoChange
    /\ IsServing(r)
    /\ IsStoredByMajority(r, view[r].changedAt)

OneStep(voters) == {voters \union {p} : p \in Replicas} \union {voters \ {p} : p \in Replicas}

Propose(r) ==
    /\ role[r] = "master"
    /\ count.changes < MaxChanges
    /\ MayChange(r)
    /\ \E after \in OneStep(view[r].voters) \ {view[r].voters} :
        /\ r \in after
        /\ view' = [view EXCEPT ![r].change = after]
        /\ requests' = requests \union {[epoch |-> promised[r], before |-> view[r].voters, after |-> after]}
    /\ count' = [count EXCEPT !.changes = @ + 1]
    /\ UNCHANGED <<store, promised, log, whole, role, commit, slave, promises, peers, messages, committed>>

(* The transaction compares the epoch's claim and the membership as it was. The request may arrive after its master died. *)
StoreChanges(q) ==
    /\ q.epoch = store.epoch
    /\ q.before = store.voters
    /\ store' = [store EXCEPT !.voters = q.after, !.madeIn = q.epoch]
    /\ requests' = requests \ {q}
    /\ UNCHANGED <<promised, log, whole, role, commit, slave, promises, view, peers, messages, committed, count>>

LearnChange(r) ==
    /\ role[r] = "master"
    /\ view[r].change # NoChange
    /\ store.voters = view[r].change
    /\ store.madeIn = promised[r]
    /\ view' = [view EXCEPT ![r] = [voters |-> @.change, change |-> NoChange, changedAt |-> commit[r]]]
    /\ UNCHANGED <<store, requests, promised, log, whole, role, commit, slave, promises, peers, messages, committed, count>>

(* The store refused the change, as it has given a later epoch. *)
ForgetChange(r) ==
    /\ role[r] = "master"
    /\ view[r].change # NoChange
    /\ store.epoch > promised[r]
    /\ view' = [view EXCEPT ![r].change = NoChange]
    /\ UNCHANGED <<store, requests, promised, log, whole, role, commit, slave, promises, peers, messages, committed, count>>

(* A replica that has left, a learner too, is no peer any more. Should it return, what it sent before is of an earlier round. *)
ForgetPeer(r, p) ==
    /\ role[r] = "master"
    /\ p \notin view[r].voters \union view[r].change \union {r}
    /\ count.changes < MaxChanges
    /\ count' = [count EXCEPT !.changes = @ + 1]
    /\ peers' = [peers EXCEPT ![r][p] = [FreshPeer EXCEPT !.round = peers[r][p].round + 1]]
    /\ UNCHANGED <<store, requests, promised, log, whole, role, commit, slave, promises, view, messages, committed>>

------------------------------------------------------------------------------
(* Faults. *)

(* A connection ends with its process: nothing sent to a process reaches its successor, which may know less of what is committed. *)
Without(r) == {m \in messages : m.to # r}

Kill(r) ==
    /\ count.kills < MaxKills
    /\ count' = [count EXCEPT !.kills = @ + 1]
    /\ NoLongerMaster(r)
    /\ slave' = [slave EXCEPT ![r] = FreshSlave]
    /\ \E known \in 0..commit[r] : commit' = [commit EXCEPT ![r] = known]
    /\ messages' = Without(r)
    /\ UNCHANGED <<store, requests, promised, log, whole, committed>>

(* The contract: no majority of the voters forgets at one time. *)
MayForget(r) ==
    LET doubtful == {p \in Replicas : ~whole[p]} \union {r}
        possible == {q \in requests : q.epoch = store.epoch /\ q.before = store.voters}
        memberships == {store.voters} \union {q.after : q \in possible}
    IN \A voters \in memberships : (voters \ doubtful) \in Majorities(voters)

PowerCut(r) ==
    /\ count.cuts < MaxCuts
    /\ MayForget(r)
    /\ \E kept \in 0..Len(log[r]) :
        /\ log' = [log EXCEPT ![r] = Prefix(@, kept)]
        /\ \E known \in 0..Least(commit[r], kept) : commit' = [commit EXCEPT ![r] = known]
    /\ whole' = [whole EXCEPT ![r] = FALSE]
    /\ count' = [count EXCEPT !.cuts = @ + 1]
    /\ NoLongerMaster(r)
    /\ slave' = [slave EXCEPT ![r] = FreshSlave]
    /\ messages' = Without(r)
    /\ UNCHANGED <<store, requests, promised, committed>>

------------------------------------------------------------------------------
Next ==
    \/ \E r \in Replicas :
        \/ GiveEpoch(r) \/ BecomeMaster(r) \/ Write(r) \/ Report(r)
        \/ \E epoch \in 1..store.epoch : WinEpoch(r, epoch) \/ AnswerPromiseRequest(r, epoch)
        \/ \E p \in Replicas : Send(r, p) \/ ForgetPeer(r, p)
        \/ \E index \in 1..Len(log[r]) : Commit(r, index)
        \/ Propose(r) \/ LearnChange(r) \/ ForgetChange(r)
        \/ Kill(r) \/ PowerCut(r)
    \/ \E m \in messages : TakePromise(m) \/ AnswerAppend(m) \/ TakeAck(m) \/ TakeMismatch(m)
    \/ \E q \in requests : StoreChanges(q)

Spec == Init /\ [][Next]_vars

(* Messages that somebody may still take. *)
Alive == {m \in messages :
    CASE m.kind = "Append" -> m.epoch >= promised[m.to]
      [] m.kind = "Promise" -> m.epoch = promised[m.to] /\ role[m.to] = "fencing"
      [] OTHER -> m.epoch = promised[m.to] /\ role[m.to] = "master"}

(* The model's limits. *)
InLimits == Cardinality(Alive) <= MaxMessages

(* States that differ in dead messages only are the same. *)
View == <<store, requests, promised, log, whole, role, commit, slave, promises, view, peers, Alive, committed, count>>

------------------------------------------------------------------------------
(* What must be true. *)

ElectionSafety == \A a, b \in Replicas : role[a] = "master" /\ role[b] = "master" /\ promised[a] = promised[b] => a = b

LogMatching ==
    \A a, b \in Replicas : \A i \in 1..Least(Len(log[a]), Len(log[b])) :
        log[a][i].epoch = log[b][i].epoch => Prefix(log[a], i) = Prefix(log[b], i)

LeaderCompleteness ==
    \A r \in Replicas : role[r] = "master" =>
        \A c \in committed : c.epoch < promised[r] => Len(log[r]) >= c.index /\ log[r][c.index] = c.entry

StateMachineSafety == \A a, b \in committed : a.index = b.index => a.entry = b.entry

(* A process never takes for committed what no master committed. *)
Honesty ==
    \A r \in Replicas : commit[r] <= Len(log[r]) /\ \A i \in 1..commit[r] : \E c \in committed : c.index = i /\ c.entry = log[r][i]

(* No slave is told to cut what it knows to be committed: the product would end the link. *)
InStep ==
    \A r, s \in Replicas :
        role[r] = "master" /\ role[s] = "slave" /\ slave[s].inStep /\ promised[s] = promised[r]
            => Len(log[s]) <= Len(log[r]) /\ Prefix(log[r], Len(log[s])) = log[s]
=============================================================================
