-------------------------- MODULE ReplicationTrace --------------------------
(* Whether what a group did is a behaviour of Replication.tla. `tests/sim/replica_tracer.py` writes the lines: what the replicas of a
   simulated or a real group did, one after the other. Each line allows one action with the arguments of the line, and its outcome must be
   the line's. TLC accepts a trace if it can take all its lines.

   A promise has a line when it is on disk, which must come before the lines that depend on it. Messages stay on their way, so that each may
   come again. *)
EXTENDS Replication

CONSTANT Lines

VARIABLE at

IsSent(m) == m \in messages' /\ messages \subseteq messages'

Sends(m) == messages' = messages \union {m}

(* A message that was sent may be sent again. *)
SendIt(l) ==
    LET peer == peers[l.r][l.m.to] IN
    IF peer.inStep /\ l.m.prev = peer.next - 1
    THEN Send(l.r, l.m.to) /\ Sends(l.m) /\ peers'[l.r][l.m.to].next = l.m.prev + Len(l.m.entries) + 1
    ELSE (Send(l.r, l.m.to) \/ UNCHANGED vars) /\ Sends(l.m)

(* What a master counts for a peer. *)
Follows(peer, shown) == peer.inStep = shown.inStep /\ peer.match = shown.match /\ peer.round = shown.round

(* What a replica shows of itself. A master of the specification may have stepped down already. *)
Is(l) ==
    /\ promised[l.r] = l.promised
    /\ LastOf(log[l.r]) = l.last
    /\ commit[l.r] = l.commit
    /\ whole[l.r] = l.whole
    /\ slave[l.r] = l.slave
    /\ l.leads => role[l.r] = "master"
    /\ \A i \in DOMAIN l.peers : Follows(peers[l.r][l.peers[i].name], l.peers[i])
    /\ UNCHANGED vars

Take(l) ==
    CASE l.do = "GiveEpoch" -> GiveEpoch(l.r) /\ store'.epoch = l.epoch
      [] l.do = "WinEpoch" -> WinEpoch(l.r, l.epoch)
      [] l.do = "PromiseEpoch" -> AnswerPromiseRequest(l.r, l.epoch)
      [] l.do = "AnswerPromiseRequest" -> promised[l.r] = l.m.epoch /\ AnswerPromiseRequest(l.r, l.m.epoch) /\ IsSent(l.m)
      [] l.do = "TakePromise" -> l.m \in messages /\ TakePromise(l.m) /\ IsSent(l.m)
      [] l.do = "BecomeMaster" -> BecomeMaster(l.r)
      [] l.do = "Write" -> Write(l.r)
      [] l.do = "Send" -> SendIt(l)
      [] l.do = "AnswerAppend" -> promised[l.r] = l.m.epoch /\ l.m \in messages /\ AnswerAppend(l.m) /\ IsSent(l.m)
      [] l.do = "Report" -> (Report(l.r) \/ UNCHANGED vars) /\ Sends(l.m)
      [] l.do = "TakeAck" -> l.m \in messages /\ TakeAck(l.m) /\ IsSent(l.m)
      [] l.do = "TakeMismatch" -> l.m \in messages /\ TakeMismatch(l.m) /\ IsSent(l.m)
      [] l.do = "Commit" -> Commit(l.r, l.index)
      [] l.do = "Propose" -> Propose(l.r) /\ view'[l.r].change = l.after
      [] l.do = "StoreChanges" -> \E q \in requests : q.after = l.after /\ StoreChanges(q)
      [] l.do = "LearnChange" -> LearnChange(l.r)
      [] l.do = "ForgetChange" -> ForgetChange(l.r)
      [] l.do = "ForgetPeer" -> ForgetPeer(l.r, l.peer)
      [] l.do = "Kill" -> Kill(l.r) /\ commit'[l.r] = l.commit
      [] l.do = "PowerCut" -> PowerCut(l.r) /\ Len(log'[l.r]) = l.kept /\ commit'[l.r] = 0
      [] l.do = "Is" -> Is(l)

TraceInit == Init /\ at = 1

TraceNext == at <= Len(Lines) /\ Take(Lines[at]) /\ at' = at + 1

TraceSpec == TraceInit /\ [][TraceNext]_<<vars, at>>
=============================================================================
