package events

import "encoding/json"

// Entry describes one type of event.
type Entry struct {
	Type   Type
	Aspect Aspect // the aspect whose subject carries the event
	Doc    string // one line for docs/events.md
	New    func() Payload
	decode func(json.RawMessage) (Payload, error)
}

// entry returns the entry for payload type P.
func entry[P Payload](aspect Aspect, doc string) Entry {
	var zero P
	return Entry{
		Type:   zero.EventType(),
		Aspect: aspect,
		Doc:    doc,
		New:    func() Payload { var p P; return p },
		decode: func(data json.RawMessage) (Payload, error) {
			var p P
			if len(data) == 0 {
				return p, nil
			}
			err := json.Unmarshal(data, &p)
			return p, err
		},
	}
}

// Catalogue returns all event types, in the order of docs/events.md.
func Catalogue() []Entry {
	return []Entry{
		entry[SessionCreated](Life, "The session was created; the event pins the agent's version and names architecture, provider and options."),
		entry[SessionForked](Life, "The session continues from an event of another session; names the snapshots that its files and the agent's records come from."),
		entry[SessionOptionsUpdated](Life, "The session's options or metadata changed."),
		entry[SessionIdle](Life, "The idle timeout passed; the sandbox is released, and the next message continues the session."),
		entry[SessionClosed](Life, "The session accepts no more messages; running executions are cancelled."),
		entry[SessionDeleted](Life, "The session was deleted; always its last life event."),
		entry[MessageAccepted](Life, "A query was accepted and stored; it is the user_message block of its execution."),
		entry[ExecutionQueued](Life, "The execution waits behind others in the session's queue."),
		entry[ExecutionDispatched](Life, "An executor may claim the execution; from now on only an event on the run subject ends it."),
		entry[ExecutionWithdrawn](Life, "The execution ended before it was dispatched."),
		entry[InterruptRequested](Life, "A client requested that the turn stop; the agent's process is kept."),
		entry[CancelRequested](Life, "A client or the session service requested that the execution stop; its process is killed after 10 s."),
		entry[PauseRequested](Life, "A client requested that the execution pause; its processes keep their memory."),
		entry[ResumeRequested](Life, "A client requested that a paused execution resume."),
		entry[TerminateRequested](Life, "A client requested that the sandbox be terminated at once, with everything that runs in it."),
		entry[SyncRequested](Life, "A client requested a snapshot of the workspace."),
		entry[FilePut](Life, "A client put a file or an archive into the workspace; the executor that holds the session applies the change."),
		entry[FileRemoved](Life, "A client removed a file from the workspace; the executor that holds the session applies the change."),
		entry[ApprovalDecided](Life, "A person decided an approval request."),
		entry[ExecutionClaimed](Run, "An executor claimed the execution and holds the session under a new epoch."),
		entry[ExecutionResolved](Run, "The agent, environments and skills of the execution, as they were resolved when it started."),
		entry[ExecutionAttached](Run, "The executor that took over a running execution follows its agent; the claim does not count as a failed one."),
		entry[ExecutionHandedOver](Run, "The executor is shutting down and leaves the execution to the next executor."),
		entry[ExecutionStarted](Run, "An attempt started: the agent received the query."),
		entry[AttemptFailed](Run, "The agent's process or its sandbox died during the turn; the agent is started again after a wait."),
		entry[ExecutionCompleted](Run, "Terminal: the query was answered."),
		entry[ExecutionFailed](Run, "Terminal: the query was not answered, with a code and a message."),
		entry[ExecutionCancelled](Run, "Terminal: a control stopped the query."),
		entry[ExecutionPaused](Run, "The execution is paused; it occupies no slot and no executor holds it until it is resumed."),
		entry[ExecutionResumed](Run, "The execution was resumed."),
		entry[SandboxCreating](Run, "The creation of a sandbox started."),
		entry[SandboxReady](Run, "The runner in the sandbox responds; names its journal."),
		entry[SandboxReplaced](Run, "The sandbox was lost and is replaced; states what was lost with it."),
		entry[SandboxTerminated](Run, "The sandbox was terminated, with the reason."),
		entry[SandboxFailed](Run, "No sandbox could be created."),
		entry[SandboxPaused](Run, "The sandbox's processes were paused."),
		entry[SandboxResumed](Run, "The sandbox's processes were resumed."),
		entry[SandboxHealth](Run, "The sandbox's health changed."),
		entry[SandboxUsage](Run, "A metered sandbox ran for a period of time, which may have a price; the periods of a session do not overlap."),
		entry[FileCreated](Run, "A file appeared in the workspace."),
		entry[FileModified](Run, "A file of the workspace changed."),
		entry[FileDeleted](Run, "A file of the workspace was deleted."),
		entry[FilesApplied](Run, "The changes of file_put and file_removed were applied to the workspace."),
		entry[WorkspaceSyncStarted](Run, "An executor started to apply file changes to a sandbox between turns and to store its workspace."),
		entry[WorkspaceSynced](Run, "The workspace and the agent's records were stored in the object store, under the name of a snapshot."),
		entry[WorkspaceTrimmed](Run, "Objects of the session's workspace that are no longer referenced were removed."),
		entry[WorkspaceRestored](Run, "A new sandbox was filled from a snapshot."),
		entry[EgressDenied](Run, "The egress proxy refused a connection or a request of the sandbox."),
		entry[ModelCalled](Run, "A request to a model, with tokens, cost and latency as the egress proxy saw them."),
		entry[BlockStart](Run, "A block was opened, or is given complete."),
		entry[BlockUpdate](Run, "Fields of an open block changed."),
		entry[BlockComplete](Run, "The complete, final block."),
		entry[SubagentSpawned](Run, "A sub-agent started, with its own conversation id."),
		entry[SubagentCompleted](Run, "A sub-agent ended."),
		entry[PermissionDecided](Run, "A permission request of the agent was answered by the recorded policy."),
		entry[ApprovalRequested](Run, "The agent waits for a person to decide."),
		entry[ApprovalResolved](Run, "The agent received the decision on an approval request."),
		entry[ApprovalRetracted](Run, "An approval request ended without a decision."),
		entry[AgentDenied](Run, "The agent's own program denied a call of a tool, without asking."),
		entry[TranscriptWritten](Run, "The agent wrote its own record of the conversation, from which it can be resumed."),
		entry[MetadataUpdate](Run, "Usage, cost and model of the execution so far."),
		entry[Log](Run, "A line that an agent printed outside its protocol, or a message of the runner."),
		entry[RunRetired](Run, "The session is deleted and its run subject accepts no more commits; records its usage by day. Earlier content may be removed."),
		entry[ContentRemoved](Run, "The content of a deleted session was removed; only its final events remain."),
		entry[Error](Run, "Something failed that does not end the execution by itself; the event that ends the execution states its outcome."),
		entry[WatchdogWarned](Run, "The agent sent nothing for too long, or did not exit after its result."),
		entry[LoopDetected](Run, "An agent, or a sub-agent, repeats the same tool call with the same result."),
		entry[KeyCreated](Key, "An API key was created; only its hash is stored."),
		entry[KeyRevoked](Key, "An API key was revoked and is no longer accepted."),
		entry[AgentApplied](Agent, "A version of an agent was applied, or its tags moved."),
		entry[AgentRemoved](Agent, "The agent was removed: new sessions cannot use it."),
		entry[InstanceApplied](Instance, "A version of an agent instance was applied, or its tags moved."),
		entry[InstanceRemoved](Instance, "The agent instance was removed."),
		entry[EnvironmentApplied](Environment, "A version of an environment was applied, or its tags moved; holds only the names of secrets."),
		entry[EnvironmentRemoved](Environment, "The environment was removed."),
		entry[SkillPushed](Skill, "A version of a skill was pushed: a ZIP in the object store, named by its SHA-256."),
		entry[SkillTagged](Skill, "A tag of the skill was moved to another version."),
		entry[SkillRemoved](Skill, "The skill, or one version of it, was removed."),
		entry[TenantBudgetSet](TenantBudget, "A tenant's budget for a day, a month or in total was set and replaces the previous one."),
		entry[TenantBudgetRemoved](TenantBudget, "The tenant's budget for the period was removed."),
		entry[TenantLimitsSet](LimitsAspect, "A tenant's own limits were set and replace the previous ones."),
		entry[TenantLimitsRemoved](LimitsAspect, "The tenant's own limits were removed; the settings of the services apply."),
	}
}

// byType holds the catalogue by type name. It is never changed after initialization.
var byType = func() map[Type]Entry {
	m := map[Type]Entry{}
	for _, e := range Catalogue() {
		m[e.Type] = e
	}
	return m
}()

// Lookup returns the catalogue entry of a type, and whether the catalogue has one.
func Lookup(t Type) (Entry, bool) {
	e, ok := byType[t]
	return e, ok
}

// Terminal reports whether a type ends an execution.
func Terminal(t Type) bool {
	switch t {
	case ExecutionCompleted{}.EventType(), ExecutionFailed{}.EventType(), ExecutionCancelled{}.EventType(), ExecutionWithdrawn{}.EventType():
		return true
	}
	return false
}
