---------------------------- MODULE OrderingTrace ----------------------------
(* Whether what a cluster did with an ordered subject is a behaviour of Ordering.tla. `tests/specs/ordering_traces.py` writes the lines. Each
   line allows one action with the arguments of the line, and its outcome must be the line's. TLC accepts a trace if it can take all its
   lines.

   What is seen from outside: the records in the coordination store, the committed logs, what the application sends and is told, and what
   its handlers get. The other actions (a stream's sends, a broker's accepts, a consumer's pulls, a group that is out of reach) are put
   between the lines that need them. So a trace that is accepted has a behaviour of the specification that shows the same. *)
EXTENDS Ordering

CONSTANTS FirstRoute, Lines

VARIABLE at

M(l) == [key |-> l.k, number |-> l.n]

(* A message that is stored at a place. *)
IsStored(l) == l.pos \in DOMAIN logs[l.pp] /\ logs[l.pp][l.pos] = M(l) /\ UNCHANGED vars

(* A handler gets a message only while its consumer has the lane: by the consumer's clock the lease ends before the broker ends it. The
   specification does not need this, as a verdict without the lane does not count. *)
IsGiven(l) ==
    LET h == hands[l.c][l.k] IN
    /\ h.pos = l.pos
    /\ h.pp = l.pp
    /\ ~h.aside
    /\ lanes[l.pp][l.k].holder = l.c
    /\ UNCHANGED vars

Take(l) ==
    CASE l.do = "Prepare" -> Prepare(l.keys, l.next) /\ Latest + 1 = l.version
      [] l.do = "Seal" -> Seal(l.pp) /\ Len(logs'[l.pp]) = l.pos
      [] l.do = "IsSealed" -> IsSealed(l.pp) /\ Len(logs[l.pp]) = l.pos /\ UNCHANGED vars
      [] l.do = "Fence" -> Fence(l.pp)
      [] l.do = "AllClosed" -> AllClosed /\ Latest + 1 = l.version
      [] l.do = "Publish" -> Publish /\ routes'[Len(routes')] = l.route
      [] l.do = "Accept" -> Accept(l.pp) /\ accepted'[l.pp][Len(accepted'[l.pp])] = M(l)
      [] l.do = "Commit" -> Commit(l.pp) /\ Len(logs'[l.pp]) = l.pos /\ logs'[l.pp][l.pos] = M(l)
      [] l.do = "IsStored" -> IsStored(l)
      [] l.do = "GoAway" -> GoAway(l.pp)
      [] l.do = "LoseLease" -> LoseLease(l.pp)
      [] l.do = "ComeBack" -> ComeBack(l.pp) /\ Len(logs'[l.pp]) = l.pos
      [] l.do = "Make" -> Make(l.k) /\ made'[l.k] = l.n
      [] l.do = "Send" -> Send(l.k) /\ Head(waiting[l.k]) = M(l) /\ routes[known][l.k] = l.pp
      [] l.do = "Answered" -> Answered(l.pp) /\ Head(outstanding[l.pp]) = M(l)
      [] l.do = "IsAcked" -> M(l) \in acked /\ M(l) \in Elements(logs[l.pp]) /\ UNCHANGED vars
      [] l.do = "GiveUp" -> GiveUp(l.pp)
      [] l.do = "LearnRoute" -> LearnRoute
      [] l.do = "Attach" -> Attach(l.c, l.k, l.pp)
      [] l.do = "Revoke" -> Revoke(l.pp, l.k)
      [] l.do = "Pull" -> Pull(l.c, l.pp, l.k)
      [] l.do = "GoOn" -> GoOn(l.c, l.k) /\ hands'[l.c][l.k].pos = l.pos
      [] l.do = "Has" -> IsGiven(l)
      [] l.do = "Handle" -> Handle(l.c, l.k) /\ hands[l.c][l.k].pos = l.pos /\ hands[l.c][l.k].pp = l.pp
      [] l.do = "IsSeen" -> logs[l.pp][l.pos] \in seen /\ UNCHANGED vars
      [] l.do = "Settle" -> Settle(l.c, l.k) /\ hands[l.c][l.k].pos = l.pos /\ hands[l.c][l.k].token = l.token
      [] l.do = "Park" -> Park(l.c, l.k) /\ hands[l.c][l.k].pos = l.pos /\ hands[l.c][l.k].token = l.token
      [] l.do = "Drop" -> Drop(l.c, l.k)
      [] l.do = "Inherit" -> Inherit(l.k) /\ parked'[l.pp][l.k] /\ ~parked[l.pp][l.k]
      [] l.do = "Advance" -> Advance(l.k) /\ frontier'[l.k] = l.version
      [] OTHER -> FALSE

TraceInit == Begin(FirstRoute) /\ at = 1

TraceNext == at <= Len(Lines) /\ Take(Lines[at]) /\ at' = at + 1

TraceSpec == TraceInit /\ [][TraceNext]_<<vars, at>>
=============================================================================
