package events

// The wire names of the event types: the Go type name in snake case.

// EventType returns "session_created".
func (SessionCreated) EventType() Type { return "session_created" }
func (SessionCreated) sealed()         {}

// EventType returns "session_forked".
func (SessionForked) EventType() Type { return "session_forked" }
func (SessionForked) sealed()         {}

// EventType returns "session_options_updated".
func (SessionOptionsUpdated) EventType() Type { return "session_options_updated" }
func (SessionOptionsUpdated) sealed()         {}

// EventType returns "session_idle".
func (SessionIdle) EventType() Type { return "session_idle" }
func (SessionIdle) sealed()         {}

// EventType returns "session_closed".
func (SessionClosed) EventType() Type { return "session_closed" }
func (SessionClosed) sealed()         {}

// EventType returns "session_deleted".
func (SessionDeleted) EventType() Type { return "session_deleted" }
func (SessionDeleted) sealed()         {}

// EventType returns "message_accepted".
func (MessageAccepted) EventType() Type { return "message_accepted" }
func (MessageAccepted) sealed()         {}

// EventType returns "execution_queued".
func (ExecutionQueued) EventType() Type { return "execution_queued" }
func (ExecutionQueued) sealed()         {}

// EventType returns "execution_dispatched".
func (ExecutionDispatched) EventType() Type { return "execution_dispatched" }
func (ExecutionDispatched) sealed()         {}

// EventType returns "execution_withdrawn".
func (ExecutionWithdrawn) EventType() Type { return "execution_withdrawn" }
func (ExecutionWithdrawn) sealed()         {}

// EventType returns "interrupt_requested".
func (InterruptRequested) EventType() Type { return "interrupt_requested" }
func (InterruptRequested) sealed()         {}

// EventType returns "cancel_requested".
func (CancelRequested) EventType() Type { return "cancel_requested" }
func (CancelRequested) sealed()         {}

// EventType returns "execution_claimed".
func (ExecutionClaimed) EventType() Type { return "execution_claimed" }
func (ExecutionClaimed) sealed()         {}

// EventType returns "execution_attached".
func (ExecutionAttached) EventType() Type { return "execution_attached" }
func (ExecutionAttached) sealed()         {}

// EventType returns "execution_handed_over".
func (ExecutionHandedOver) EventType() Type { return "execution_handed_over" }
func (ExecutionHandedOver) sealed()         {}

// EventType returns "execution_started".
func (ExecutionStarted) EventType() Type { return "execution_started" }
func (ExecutionStarted) sealed()         {}

// EventType returns "execution_completed".
func (ExecutionCompleted) EventType() Type { return "execution_completed" }
func (ExecutionCompleted) sealed()         {}

// EventType returns "execution_failed".
func (ExecutionFailed) EventType() Type { return "execution_failed" }
func (ExecutionFailed) sealed()         {}

// EventType returns "execution_cancelled".
func (ExecutionCancelled) EventType() Type { return "execution_cancelled" }
func (ExecutionCancelled) sealed()         {}

// EventType returns "sandbox_creating".
func (SandboxCreating) EventType() Type { return "sandbox_creating" }
func (SandboxCreating) sealed()         {}

// EventType returns "sandbox_ready".
func (SandboxReady) EventType() Type { return "sandbox_ready" }
func (SandboxReady) sealed()         {}

// EventType returns "sandbox_replaced".
func (SandboxReplaced) EventType() Type { return "sandbox_replaced" }
func (SandboxReplaced) sealed()         {}

// EventType returns "sandbox_terminated".
func (SandboxTerminated) EventType() Type { return "sandbox_terminated" }
func (SandboxTerminated) sealed()         {}

// EventType returns "sandbox_failed".
func (SandboxFailed) EventType() Type { return "sandbox_failed" }
func (SandboxFailed) sealed()         {}

// EventType returns "sandbox_usage".
func (SandboxUsage) EventType() Type { return "sandbox_usage" }
func (SandboxUsage) sealed()         {}

// EventType returns "block_start".
func (BlockStart) EventType() Type { return "block_start" }
func (BlockStart) sealed()         {}

// EventType returns "block_update".
func (BlockUpdate) EventType() Type { return "block_update" }
func (BlockUpdate) sealed()         {}

// EventType returns "block_complete".
func (BlockComplete) EventType() Type { return "block_complete" }
func (BlockComplete) sealed()         {}

// EventType returns "subagent_spawned".
func (SubagentSpawned) EventType() Type { return "subagent_spawned" }
func (SubagentSpawned) sealed()         {}

// EventType returns "subagent_completed".
func (SubagentCompleted) EventType() Type { return "subagent_completed" }
func (SubagentCompleted) sealed()         {}

// EventType returns "permission_decided".
func (PermissionDecided) EventType() Type { return "permission_decided" }
func (PermissionDecided) sealed()         {}

// EventType returns "transcript_written".
func (TranscriptWritten) EventType() Type { return "transcript_written" }
func (TranscriptWritten) sealed()         {}

// EventType returns "metadata_update".
func (MetadataUpdate) EventType() Type { return "metadata_update" }
func (MetadataUpdate) sealed()         {}

// EventType returns "log".
func (Log) EventType() Type { return "log" }
func (Log) sealed()         {}

// EventType returns "error".
func (Error) EventType() Type { return "error" }
func (Error) sealed()         {}

// EventType returns "watchdog_warned".
func (WatchdogWarned) EventType() Type { return "watchdog_warned" }
func (WatchdogWarned) sealed()         {}

// EventType returns "loop_detected".
func (LoopDetected) EventType() Type { return "loop_detected" }
func (LoopDetected) sealed()         {}

// EventType returns "key_created".
func (KeyCreated) EventType() Type { return "key_created" }
func (KeyCreated) sealed()         {}

// EventType returns "key_revoked".
func (KeyRevoked) EventType() Type { return "key_revoked" }
func (KeyRevoked) sealed()         {}

// EventType returns "file_put".
func (FilePut) EventType() Type { return "file_put" }
func (FilePut) sealed()         {}

// EventType returns "file_removed".
func (FileRemoved) EventType() Type { return "file_removed" }
func (FileRemoved) sealed()         {}

// EventType returns "sync_requested".
func (SyncRequested) EventType() Type { return "sync_requested" }
func (SyncRequested) sealed()         {}

// EventType returns "pause_requested".
func (PauseRequested) EventType() Type { return "pause_requested" }
func (PauseRequested) sealed()         {}

// EventType returns "resume_requested".
func (ResumeRequested) EventType() Type { return "resume_requested" }
func (ResumeRequested) sealed()         {}

// EventType returns "terminate_requested".
func (TerminateRequested) EventType() Type { return "terminate_requested" }
func (TerminateRequested) sealed()         {}

// EventType returns "file_created".
func (FileCreated) EventType() Type { return "file_created" }
func (FileCreated) sealed()         {}

// EventType returns "file_modified".
func (FileModified) EventType() Type { return "file_modified" }
func (FileModified) sealed()         {}

// EventType returns "file_deleted".
func (FileDeleted) EventType() Type { return "file_deleted" }
func (FileDeleted) sealed()         {}

// EventType returns "workspace_synced".
func (WorkspaceSynced) EventType() Type { return "workspace_synced" }
func (WorkspaceSynced) sealed()         {}

// EventType returns "workspace_trimmed".
func (WorkspaceTrimmed) EventType() Type { return "workspace_trimmed" }
func (WorkspaceTrimmed) sealed()         {}

// EventType returns "workspace_sync_started".
func (WorkspaceSyncStarted) EventType() Type { return "workspace_sync_started" }
func (WorkspaceSyncStarted) sealed()         {}

// EventType returns "workspace_restored".
func (WorkspaceRestored) EventType() Type { return "workspace_restored" }
func (WorkspaceRestored) sealed()         {}

// EventType returns "files_applied".
func (FilesApplied) EventType() Type { return "files_applied" }
func (FilesApplied) sealed()         {}

// EventType returns "execution_paused".
func (ExecutionPaused) EventType() Type { return "execution_paused" }
func (ExecutionPaused) sealed()         {}

// EventType returns "execution_resumed".
func (ExecutionResumed) EventType() Type { return "execution_resumed" }
func (ExecutionResumed) sealed()         {}

// EventType returns "attempt_failed".
func (AttemptFailed) EventType() Type { return "attempt_failed" }
func (AttemptFailed) sealed()         {}

// EventType returns "sandbox_paused".
func (SandboxPaused) EventType() Type { return "sandbox_paused" }
func (SandboxPaused) sealed()         {}

// EventType returns "sandbox_resumed".
func (SandboxResumed) EventType() Type { return "sandbox_resumed" }
func (SandboxResumed) sealed()         {}

// EventType returns "sandbox_health".
func (SandboxHealth) EventType() Type { return "sandbox_health" }
func (SandboxHealth) sealed()         {}

// EventType returns "egress_denied".
func (EgressDenied) EventType() Type { return "egress_denied" }
func (EgressDenied) sealed()         {}

// EventType returns "model_called".
func (ModelCalled) EventType() Type { return "model_called" }
func (ModelCalled) sealed()         {}

// EventType returns "agent_applied".
func (AgentApplied) EventType() Type { return "agent_applied" }
func (AgentApplied) sealed()         {}

// EventType returns "agent_removed".
func (AgentRemoved) EventType() Type { return "agent_removed" }
func (AgentRemoved) sealed()         {}

// EventType returns "instance_applied".
func (InstanceApplied) EventType() Type { return "instance_applied" }
func (InstanceApplied) sealed()         {}

// EventType returns "instance_removed".
func (InstanceRemoved) EventType() Type { return "instance_removed" }
func (InstanceRemoved) sealed()         {}

// EventType returns "environment_applied".
func (EnvironmentApplied) EventType() Type { return "environment_applied" }
func (EnvironmentApplied) sealed()         {}

// EventType returns "environment_removed".
func (EnvironmentRemoved) EventType() Type { return "environment_removed" }
func (EnvironmentRemoved) sealed()         {}

// EventType returns "skill_pushed".
func (SkillPushed) EventType() Type { return "skill_pushed" }
func (SkillPushed) sealed()         {}

// EventType returns "skill_tagged".
func (SkillTagged) EventType() Type { return "skill_tagged" }
func (SkillTagged) sealed()         {}

// EventType returns "skill_removed".
func (SkillRemoved) EventType() Type { return "skill_removed" }
func (SkillRemoved) sealed()         {}

// EventType returns "execution_resolved".
func (ExecutionResolved) EventType() Type { return "execution_resolved" }
func (ExecutionResolved) sealed()         {}

// EventType returns "tenant_budget_set".
func (TenantBudgetSet) EventType() Type { return "tenant_budget_set" }
func (TenantBudgetSet) sealed()         {}

// EventType returns "tenant_budget_removed".
func (TenantBudgetRemoved) EventType() Type { return "tenant_budget_removed" }
func (TenantBudgetRemoved) sealed()         {}

// EventType returns "tenant_limits_set".
func (TenantLimitsSet) EventType() Type { return "tenant_limits_set" }
func (TenantLimitsSet) sealed()         {}

// EventType returns "tenant_limits_removed".
func (TenantLimitsRemoved) EventType() Type { return "tenant_limits_removed" }
func (TenantLimitsRemoved) sealed()         {}

// EventType returns "run_retired".
func (RunRetired) EventType() Type { return "run_retired" }
func (RunRetired) sealed()         {}

// EventType returns "content_removed".
func (ContentRemoved) EventType() Type { return "content_removed" }
func (ContentRemoved) sealed()         {}

// EventType returns "approval_requested".
func (ApprovalRequested) EventType() Type { return "approval_requested" }
func (ApprovalRequested) sealed()         {}

// EventType returns "approval_decided".
func (ApprovalDecided) EventType() Type { return "approval_decided" }
func (ApprovalDecided) sealed()         {}

// EventType returns "approval_resolved".
func (ApprovalResolved) EventType() Type { return "approval_resolved" }
func (ApprovalResolved) sealed()         {}

// EventType returns "approval_retracted".
func (ApprovalRetracted) EventType() Type { return "approval_retracted" }
func (ApprovalRetracted) sealed()         {}

// EventType returns "agent_denied".
func (AgentDenied) EventType() Type { return "agent_denied" }
func (AgentDenied) sealed()         {}
