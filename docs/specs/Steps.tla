--------------------------------- MODULE Steps ---------------------------------
(* Steps (docs/adr/0025): a handler's settlement and what it sends are one entry of the log; effects are forwarded under plans. TLC checks
   the invariants at the end of this module.

   There is one source group with one lane, whose messages are 1, 2, ...; the step of a message sends one effect to each target. The log of
   the source group is committed up to `committed`; what is behind may be cut when the master changes (Replication.tla is about why). A target
   takes the batches of its stream one after the other, each number once, as a partition of an ordered subject does.

   Left out: refused batches and changes of routes, which the dispatcher handles as for delayed messages (Ordering.tla is about routes). *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS
    Targets,
    MaxMessages,   \* limits of the model: consumed messages,
    MaxToken,      \* grants of the lane,
    MaxRuns,       \* runs of the handler for a delivery, each with its own step,
    MaxKills,      \* changes of the master,
    Window         \* the most effects of a target that the master keeps in memory

VARIABLES
    log,           \* the source group's entries, as its master has them
    committed,     \* how many of them are committed
    pulled,        \* [token, message, run]: runs of deliveries; each may ask for its step at any time, and again
    told,          \* [run, answer]: what clients were answered
    handed,        \* of each target: effects in the master's memory that are not planned
    loaded,        \* of each target: how many of its decided effects this master has looked at
    sent,          \* batches on the way, for ever: a packet may be late
    stored,        \* of each target: the effects, in order
    numbers,       \* of each target: the number of the last batch that it took
    up,            \* whether the target can be reached
    kills

source == <<log, committed, pulled, told>>
memory == <<handed, loaded>>
targets == <<stored, numbers, up>>
vars == <<source, memory, sent, targets, kills>>

Step(f) == [kind |-> "step", token |-> f.token, message |-> f.message, run |-> f.run]
Grant == [kind |-> "grant"]
Plan(t, number, effects) == [kind |-> "plan", target |-> t, number |-> number, effects |-> effects]
Done(t, number) == [kind |-> "done", target |-> t, number |-> number]

Elements(sequence) == {sequence[i] : i \in DOMAIN sequence}
Committed == SubSeq(log, 1, committed)

(* What follows from a log. *)
Token(entries) == Len(SelectSeq(entries, LAMBDA each : each.kind = "grant"))
StepsOf(entries) == SelectSeq(entries, LAMBDA each : each.kind = "step")
Settled(entries) == {each.message : each \in Elements(StepsOf(entries))}
PlansOf(entries, t) == SelectSeq(entries, LAMBDA each : each.kind = "plan" /\ each.target = t)
IsDone(entries, plan) == Done(plan.target, plan.number) \in Elements(entries)
OpenPlans(entries, t) == {plan \in Elements(PlansOf(entries, t)) : ~IsDone(entries, plan)}

(* The effects of a target that a log has decided, in order: one of each step. *)
Decided(entries, t) == StepsOf(entries)

RECURSIVE Planned(_)
Planned(plans) == IF plans = <<>> THEN 0 ELSE Len(Head(plans).effects) + Planned(Tail(plans))

Init ==
    /\ log = <<>>
    /\ committed = 0
    /\ pulled = {}
    /\ told = {}
    /\ handed = [t \in Targets |-> <<>>]
    /\ loaded = [t \in Targets |-> 0]
    /\ sent = {}
    /\ stored = [t \in Targets |-> <<>>]
    /\ numbers = [t \in Targets |-> 0]
    /\ up = [t \in Targets |-> TRUE]
    /\ kills = 0

Write(entry) == log' = Append(log, entry)

------------------------------------------------------------------------------
(* The source group. *)

Commit ==
    /\ committed < Len(log)
    /\ committed' = committed + 1
    /\ UNCHANGED <<log, pulled, told, memory, sent, targets, kills>>

(* The lane goes to the next consumer; the one before need not know it. *)
GiveLane ==
    /\ Token(log) < MaxToken
    /\ Write(Grant)
    /\ UNCHANGED <<committed, pulled, told, memory, sent, targets, kills>>

(* The holder gets the first message that is not settled. What consumers see is committed. *)
Pull ==
    LET m == Cardinality(Settled(Committed)) + 1 IN
    /\ Token(Committed) > 0
    /\ m <= MaxMessages
    /\ \E run \in 1..MaxRuns : pulled' = pulled \union {[token |-> Token(Committed), message |-> m, run |-> run]}
    /\ UNCHANGED <<log, committed, told, memory, sent, targets, kills>>

IsKnown(f) == Step(f) \in Elements(log)
IsCurrent(f) == f.token = Token(log) /\ f.message \notin Settled(log)

(* One entry: the settlement and the effects. *)
Decide(f) ==
    /\ ~IsKnown(f)
    /\ IsCurrent(f)
    /\ Write(Step(f))
    /\ UNCHANGED <<committed, pulled, told, memory, sent, targets, kills>>

Answered(f, answer) == told' = told \union {[run |-> f, answer |-> answer]}

(* The first answer, or again: the step is known by its number. *)
Acknowledge(f) ==
    /\ Step(f) \in Elements(Committed)
    /\ Answered(f, "done")
    /\ UNCHANGED <<log, committed, pulled, memory, sent, targets, kills>>

(* What the refusal was decided by is committed. *)
Refuse(f) ==
    /\ ~IsKnown(f)
    /\ ~IsCurrent(f)
    /\ committed = Len(log)
    /\ Answered(f, "stale")
    /\ UNCHANGED <<log, committed, pulled, memory, sent, targets, kills>>

(* The next master has what is committed, and some of what is not. It serves when all it has is committed. Its memory is empty: it sends the
   open plans again, and looks for effects behind what is planned. *)
ChangeMaster ==
    /\ kills < MaxKills
    /\ kills' = kills + 1
    /\ \E kept \in committed..Len(log) :
        /\ log' = SubSeq(log, 1, kept)
        /\ committed' = kept
    /\ handed' = [t \in Targets |-> <<>>]
    /\ loaded' = [t \in Targets |-> Planned(PlansOf(log', t))]
    /\ UNCHANGED <<pulled, told, sent, targets>>

------------------------------------------------------------------------------
(* Forwarding. *)

(* The next effect of a target, if it is committed and there is room for it. *)
HasRoom(t) == Len(handed[t]) < Window
CanLoad(t) == loaded[t] < Len(Decided(Committed, t)) /\ HasRoom(t)
Load(t) ==
    /\ CanLoad(t)
    /\ handed' = [handed EXCEPT ![t] = Append(@, Decided(Committed, t)[loaded[t] + 1])]
    /\ loaded' = [loaded EXCEPT ![t] = @ + 1]
    /\ UNCHANGED <<source, sent, targets, kills>>

(* Nothing is planned for a target that is away. *)
MakePlan(t) ==
    /\ up[t]
    /\ handed[t] # <<>>
    /\ Write(Plan(t, Len(PlansOf(log, t)) + 1, handed[t]))
    /\ handed' = [handed EXCEPT ![t] = <<>>]
    /\ UNCHANGED <<committed, pulled, told, loaded, sent, targets, kills>>

(* A plan leaves when it is committed: now, or again by a later master. *)
Send(plan) ==
    /\ plan \in Elements(Committed)
    /\ sent' = sent \union {plan}
    /\ UNCHANGED <<source, memory, targets, kills>>

(* A batch that the target has is answered, and not stored again. *)
Store(plan) ==
    LET t == plan.target IN
    /\ up[t]
    /\ plan.number = numbers[t] + 1
    /\ stored' = [stored EXCEPT ![t] = @ \o plan.effects]
    /\ numbers' = [numbers EXCEPT ![t] = plan.number]
    /\ UNCHANGED <<source, memory, sent, up, kills>>

Finish(t) ==
    \E plan \in OpenPlans(log, t) :
        /\ plan.number <= numbers[t]
        /\ plan \in sent
        /\ Write(Done(t, plan.number))
        /\ UNCHANGED <<committed, pulled, told, memory, sent, targets, kills>>

GoAway(t) ==
    /\ up[t]
    /\ up' = [up EXCEPT ![t] = FALSE]
    /\ UNCHANGED <<source, memory, sent, stored, numbers, kills>>

ComeBack(t) ==
    /\ ~up[t]
    /\ up' = [up EXCEPT ![t] = TRUE]
    /\ UNCHANGED <<source, memory, sent, stored, numbers, kills>>

------------------------------------------------------------------------------
Next ==
    \/ Commit \/ GiveLane \/ Pull \/ ChangeMaster
    \/ \E f \in pulled : Decide(f) \/ Acknowledge(f) \/ Refuse(f)
    \/ \E plan \in sent : Store(plan)
    \/ \E t \in Targets :
        \/ Load(t) \/ MakePlan(t) \/ Finish(t) \/ GoAway(t) \/ ComeBack(t)
        \/ \E plan \in Elements(PlansOf(log, t)) \ sent : Send(plan)

Spec == Init /\ [][Next]_vars

------------------------------------------------------------------------------
(* What must be true. *)

(* A target has the effects of committed steps, each once, in the order of the steps, and nothing else: the beginning of what is decided. *)
OnceInOrder == \A t \in Targets :
    /\ Len(stored[t]) <= Len(Decided(Committed, t))
    /\ stored[t] = SubSeq(Decided(Committed, t), 1, Len(stored[t]))

(* A message is settled by one step, which its consumer made while it had the lane; messages are settled in order. *)
OneDecision ==
    LET steps == StepsOf(log) IN
    /\ \A i \in DOMAIN steps : steps[i].message = i
    /\ \A i \in DOMAIN log : log[i].kind = "step" => log[i].token = Token(SubSeq(log, 1, i))

(* "done" is told of steps that stay; "stale" of what is no step, and never becomes one. *)
Honesty == \A each \in told :
    IF each.answer = "done" THEN Step(each.run) \in Elements(Committed) ELSE Step(each.run) \notin Elements(log)

(* Every decided effect is done (then it is stored), planned, in memory, or still to be looked at: none is lost, none is there twice. *)
RECURSIVE Joined(_)
Joined(plans) == IF plans = <<>> THEN <<>> ELSE Head(plans).effects \o Joined(Tail(plans))
NothingLost == \A t \in Targets :
    /\ Joined(PlansOf(log, t)) \o handed[t] = SubSeq(Decided(log, t), 1, loaded[t])
    /\ \A plan \in Elements(PlansOf(log, t)) : IsDone(log, plan) => Elements(plan.effects) \subseteq Elements(stored[t])

(* The master keeps few effects of a target, and a target that can be reached does not wait for one that cannot. *)
Bounded == \A t \in Targets : Len(handed[t]) <= Window
Apart == \A t \in Targets : handed[t] = <<>> /\ loaded[t] < Len(Decided(Committed, t)) => CanLoad(t)
=============================================================================
