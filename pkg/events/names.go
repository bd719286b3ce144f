package events

// The wire names of the catalogue's types: the Go name in snake case.

// EventType is session_created.
func (SessionCreated) EventType() Type { return "session_created" }
func (SessionCreated) sealed()         {}

// EventType is session_forked.
func (SessionForked) EventType() Type { return "session_forked" }
func (SessionForked) sealed()         {}

// EventType is session_options_updated.
func (SessionOptionsUpdated) EventType() Type { return "session_options_updated" }
func (SessionOptionsUpdated) sealed()         {}

// EventType is session_idle.
func (SessionIdle) EventType() Type { return "session_idle" }
func (SessionIdle) sealed()         {}

// EventType is session_closed.
func (SessionClosed) EventType() Type { return "session_closed" }
func (SessionClosed) sealed()         {}

// EventType is session_deleted.
func (SessionDeleted) EventType() Type { return "session_deleted" }
func (SessionDeleted) sealed()         {}

// EventType is message_accepted.
func (MessageAccepted) EventType() Type { return "message_accepted" }
func (MessageAccepted) sealed()         {}

// EventType is execution_queued.
func (ExecutionQueued) EventType() Type { return "execution_queued" }
func (ExecutionQueued) sealed()         {}

// EventType is execution_dispatched.
func (ExecutionDispatched) EventType() Type { return "execution_dispatched" }
func (ExecutionDispatched) sealed()         {}

// EventType is execution_withdrawn.
func (ExecutionWithdrawn) EventType() Type { return "execution_withdrawn" }
func (ExecutionWithdrawn) sealed()         {}

// EventType is interrupt_requested.
func (InterruptRequested) EventType() Type { return "interrupt_requested" }
func (InterruptRequested) sealed()         {}

// EventType is cancel_requested.
func (CancelRequested) EventType() Type { return "cancel_requested" }
func (CancelRequested) sealed()         {}

// EventType is execution_claimed.
func (ExecutionClaimed) EventType() Type { return "execution_claimed" }
func (ExecutionClaimed) sealed()         {}

// EventType is execution_attached.
func (ExecutionAttached) EventType() Type { return "execution_attached" }
func (ExecutionAttached) sealed()         {}

// EventType is execution_handed_over.
func (ExecutionHandedOver) EventType() Type { return "execution_handed_over" }
func (ExecutionHandedOver) sealed()         {}

// EventType is execution_started.
func (ExecutionStarted) EventType() Type { return "execution_started" }
func (ExecutionStarted) sealed()         {}

// EventType is execution_completed.
func (ExecutionCompleted) EventType() Type { return "execution_completed" }
func (ExecutionCompleted) sealed()         {}

// EventType is execution_failed.
func (ExecutionFailed) EventType() Type { return "execution_failed" }
func (ExecutionFailed) sealed()         {}

// EventType is execution_cancelled.
func (ExecutionCancelled) EventType() Type { return "execution_cancelled" }
func (ExecutionCancelled) sealed()         {}

// EventType is sandbox_creating.
func (SandboxCreating) EventType() Type { return "sandbox_creating" }
func (SandboxCreating) sealed()         {}

// EventType is sandbox_ready.
func (SandboxReady) EventType() Type { return "sandbox_ready" }
func (SandboxReady) sealed()         {}

// EventType is sandbox_replaced.
func (SandboxReplaced) EventType() Type { return "sandbox_replaced" }
func (SandboxReplaced) sealed()         {}

// EventType is sandbox_terminated.
func (SandboxTerminated) EventType() Type { return "sandbox_terminated" }
func (SandboxTerminated) sealed()         {}

// EventType is sandbox_failed.
func (SandboxFailed) EventType() Type { return "sandbox_failed" }
func (SandboxFailed) sealed()         {}

// EventType is sandbox_usage.
func (SandboxUsage) EventType() Type { return "sandbox_usage" }
func (SandboxUsage) sealed()         {}

// EventType is block_start.
func (BlockStart) EventType() Type { return "block_start" }
func (BlockStart) sealed()         {}

// EventType is block_update.
func (BlockUpdate) EventType() Type { return "block_update" }
func (BlockUpdate) sealed()         {}

// EventType is block_complete.
func (BlockComplete) EventType() Type { return "block_complete" }
func (BlockComplete) sealed()         {}

// EventType is subagent_spawned.
func (SubagentSpawned) EventType() Type { return "subagent_spawned" }
func (SubagentSpawned) sealed()         {}

// EventType is subagent_completed.
func (SubagentCompleted) EventType() Type { return "subagent_completed" }
func (SubagentCompleted) sealed()         {}

// EventType is permission_decided.
func (PermissionDecided) EventType() Type { return "permission_decided" }
func (PermissionDecided) sealed()         {}

// EventType is transcript_written.
func (TranscriptWritten) EventType() Type { return "transcript_written" }
func (TranscriptWritten) sealed()         {}

// EventType is metadata_update.
func (MetadataUpdate) EventType() Type { return "metadata_update" }
func (MetadataUpdate) sealed()         {}

// EventType is log.
func (Log) EventType() Type { return "log" }
func (Log) sealed()         {}

// EventType is error.
func (Error) EventType() Type { return "error" }
func (Error) sealed()         {}

// EventType is watchdog_warned.
func (WatchdogWarned) EventType() Type { return "watchdog_warned" }
func (WatchdogWarned) sealed()         {}

// EventType is key_created.
func (KeyCreated) EventType() Type { return "key_created" }
func (KeyCreated) sealed()         {}

// EventType is key_revoked.
func (KeyRevoked) EventType() Type { return "key_revoked" }
func (KeyRevoked) sealed()         {}

// EventType is file_put.
func (FilePut) EventType() Type { return "file_put" }
func (FilePut) sealed()         {}

// EventType is file_removed.
func (FileRemoved) EventType() Type { return "file_removed" }
func (FileRemoved) sealed()         {}

// EventType is sync_requested.
func (SyncRequested) EventType() Type { return "sync_requested" }
func (SyncRequested) sealed()         {}

// EventType is pause_requested.
func (PauseRequested) EventType() Type { return "pause_requested" }
func (PauseRequested) sealed()         {}

// EventType is resume_requested.
func (ResumeRequested) EventType() Type { return "resume_requested" }
func (ResumeRequested) sealed()         {}

// EventType is terminate_requested.
func (TerminateRequested) EventType() Type { return "terminate_requested" }
func (TerminateRequested) sealed()         {}

// EventType is file_created.
func (FileCreated) EventType() Type { return "file_created" }
func (FileCreated) sealed()         {}

// EventType is file_modified.
func (FileModified) EventType() Type { return "file_modified" }
func (FileModified) sealed()         {}

// EventType is file_deleted.
func (FileDeleted) EventType() Type { return "file_deleted" }
func (FileDeleted) sealed()         {}

// EventType is workspace_synced.
func (WorkspaceSynced) EventType() Type { return "workspace_synced" }
func (WorkspaceSynced) sealed()         {}

// EventType is workspace_trimmed.
func (WorkspaceTrimmed) EventType() Type { return "workspace_trimmed" }
func (WorkspaceTrimmed) sealed()         {}

// EventType is workspace_sync_started.
func (WorkspaceSyncStarted) EventType() Type { return "workspace_sync_started" }
func (WorkspaceSyncStarted) sealed()         {}

// EventType is workspace_restored.
func (WorkspaceRestored) EventType() Type { return "workspace_restored" }
func (WorkspaceRestored) sealed()         {}

// EventType is files_applied.
func (FilesApplied) EventType() Type { return "files_applied" }
func (FilesApplied) sealed()         {}

// EventType is execution_paused.
func (ExecutionPaused) EventType() Type { return "execution_paused" }
func (ExecutionPaused) sealed()         {}

// EventType is execution_resumed.
func (ExecutionResumed) EventType() Type { return "execution_resumed" }
func (ExecutionResumed) sealed()         {}

// EventType is attempt_failed.
func (AttemptFailed) EventType() Type { return "attempt_failed" }
func (AttemptFailed) sealed()         {}

// EventType is sandbox_paused.
func (SandboxPaused) EventType() Type { return "sandbox_paused" }
func (SandboxPaused) sealed()         {}

// EventType is sandbox_resumed.
func (SandboxResumed) EventType() Type { return "sandbox_resumed" }
func (SandboxResumed) sealed()         {}

// EventType is sandbox_health.
func (SandboxHealth) EventType() Type { return "sandbox_health" }
func (SandboxHealth) sealed()         {}

// EventType is egress_denied.
func (EgressDenied) EventType() Type { return "egress_denied" }
func (EgressDenied) sealed()         {}

// EventType is model_called.
func (ModelCalled) EventType() Type { return "model_called" }
func (ModelCalled) sealed()         {}

// EventType is agent_applied.
func (AgentApplied) EventType() Type { return "agent_applied" }
func (AgentApplied) sealed()         {}

// EventType is agent_removed.
func (AgentRemoved) EventType() Type { return "agent_removed" }
func (AgentRemoved) sealed()         {}

// EventType is instance_applied.
func (InstanceApplied) EventType() Type { return "instance_applied" }
func (InstanceApplied) sealed()         {}

// EventType is instance_removed.
func (InstanceRemoved) EventType() Type { return "instance_removed" }
func (InstanceRemoved) sealed()         {}

// EventType is environment_applied.
func (EnvironmentApplied) EventType() Type { return "environment_applied" }
func (EnvironmentApplied) sealed()         {}

// EventType is environment_removed.
func (EnvironmentRemoved) EventType() Type { return "environment_removed" }
func (EnvironmentRemoved) sealed()         {}

// EventType is skill_pushed.
func (SkillPushed) EventType() Type { return "skill_pushed" }
func (SkillPushed) sealed()         {}

// EventType is skill_tagged.
func (SkillTagged) EventType() Type { return "skill_tagged" }
func (SkillTagged) sealed()         {}

// EventType is skill_removed.
func (SkillRemoved) EventType() Type { return "skill_removed" }
func (SkillRemoved) sealed()         {}

// EventType is execution_resolved.
func (ExecutionResolved) EventType() Type { return "execution_resolved" }
func (ExecutionResolved) sealed()         {}

func (TenantBudgetSet) EventType() Type { return "tenant_budget_set" }
func (TenantBudgetSet) sealed()         {}

func (TenantBudgetRemoved) EventType() Type { return "tenant_budget_removed" }
func (TenantBudgetRemoved) sealed()         {}

// EventType is tenant_limits_set.
func (TenantLimitsSet) EventType() Type { return "tenant_limits_set" }
func (TenantLimitsSet) sealed()         {}

// EventType is tenant_limits_removed.
func (TenantLimitsRemoved) EventType() Type { return "tenant_limits_removed" }
func (TenantLimitsRemoved) sealed()         {}

// EventType is run_retired.
func (RunRetired) EventType() Type { return "run_retired" }
func (RunRetired) sealed()         {}

// EventType is content_removed.
func (ContentRemoved) EventType() Type { return "content_removed" }
func (ContentRemoved) sealed()         {}
