// Generated from pkg/api/spool/v1/openapi.json by `npm run generate`; do not edit.

export interface paths {
    "/api/agents": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Lists the latest version of each agent, sorted by scope, org and slug; platform entries come last. */
        get: operations["Agents_ListAgents"];
        put?: never;
        /**
         * Creates a version of an agent and tags it latest. If the same definition exists already, only moves the tags to
         *     that version.
         */
        post: operations["Agents_ApplyAgent"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/agents/{slug}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Returns a version. A digest also finds removed versions, because sessions may have pinned them. */
        get: operations["Agents_GetAgent"];
        put?: never;
        post?: never;
        /** Hides an agent: new sessions cannot refer to it; sessions that pinned a version continue. */
        delete: operations["Agents_RemoveAgent"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/approvals": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Lists approval requests, newest first. Page tokens work as in ListSessions. A page also ends at 2 MiB. */
        get: operations["Approvals_ListApprovals"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/approvals/{approval_id}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Returns an approval request. */
        get: operations["Approvals_GetApproval"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/approvals/{approval_id}/decide": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Decides an open approval request. The first decision counts. It returns when the decision is in the log, before the
         *     agent has received it; the request is then approved, rejected, skipped or answered, or retracted if the agent no
         *     longer waits. The header Idempotency-Key (gRPC metadata idempotency-key) makes a retry safe.
         */
        post: operations["Approvals_DecideApproval"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/audit": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Lists the log commits that clients caused, newest first, without their content. Commits of deleted sessions are
         *     included.
         */
        get: operations["Audit_ListAudit"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/budgets": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Lists the tenant's budgets with the usage of each. */
        get: operations["Budgets_ListBudgets"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/budgets/{period}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        /** Sets a tenant's budget for a period and replaces the former one. Only the root key may call this. */
        put: operations["Budgets_SetBudget"];
        post?: never;
        /** Removes a tenant's budget for a period. Only the root key may call this. */
        delete: operations["Budgets_RemoveBudget"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/dead": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Lists dead letters, oldest first. */
        get: operations["DeadLetters_ListDeadLetters"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/dead/{id}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Returns a dead letter with its message. */
        get: operations["DeadLetters_GetDeadLetter"];
        put?: never;
        post?: never;
        /** Removes a dead letter. */
        delete: operations["DeadLetters_DropDeadLetter"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/dead/{id}/retry": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Evaluates the letter's session again and performs the work that is due, with a new job if an executor is needed.
         *     The letter is removed.
         */
        post: operations["DeadLetters_RetryDeadLetter"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/environments": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Lists the latest version of each environment, sorted by scope, org and slug; platform entries come last. */
        get: operations["Environments_ListEnvironments"];
        put?: never;
        /**
         * Creates a version of an environment and tags it latest. If the same definition exists already, only moves the
         *     tags to that version.
         */
        post: operations["Environments_ApplyEnvironment"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/environments/explain": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Returns, for an agent with environments, the origin of each variable and of each host that it may reach. Values
         *     of secrets are never returned.
         */
        post: operations["Environments_ExplainEnvironment"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/environments/{slug}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Returns a version. A digest also finds removed versions, because sessions may have pinned them. */
        get: operations["Environments_GetEnvironment"];
        put?: never;
        post?: never;
        /** Hides an environment: new sessions cannot refer to it; sessions that pinned a version continue. */
        delete: operations["Environments_RemoveEnvironment"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/executions": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Lists the executions of all sessions, newest first. Page tokens work as in ListSessions. */
        get: operations["Executions_ListExecutions"];
        put?: never;
        /**
         * Creates a session and posts its first message in one step. The header Idempotency-Key (gRPC metadata
         *     idempotency-key) makes a retry safe. With wait, the answer comes when the execution ends or the time is up: 200 over
         *     REST if the execution has ended, otherwise 202.
         */
        post: operations["Executions_StartExecution"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/executions/{execution_id}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Returns an execution, and why it waits. */
        get: operations["Executions_GetExecution"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/executions/{execution_id}/cancel": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Ends a queued execution, or asks a running one to stop; its process is killed if it has not ended after ten
         *     seconds. If the execution has ended, nothing changes.
         */
        post: operations["Executions_CancelExecution"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/executions/{execution_id}/pause": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Asks for the running execution to be paused; its processes keep their memory. The turn limit is paused too. */
        post: operations["Executions_PauseExecution"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/executions/{execution_id}/recover": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Continues a failed execution in a new execution of the same session. The agent resumes its conversation, in which
         *     the finished tool calls of the failed execution are kept, and is asked to continue. Only the session's last
         *     execution can be recovered, and only once. The header Idempotency-Key (gRPC metadata idempotency-key) makes a retry
         *     safe.
         */
        post: operations["Executions_RecoverExecution"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/executions/{execution_id}/resume": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Resumes a paused execution. */
        post: operations["Executions_ResumeExecution"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/executions/{execution_id}/terminate": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Ends an execution immediately, with its process and its sandbox. If the execution has ended, nothing changes. */
        post: operations["Executions_TerminateExecution"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/instances": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Lists the latest version of each instance, sorted by scope, org and slug; platform entries come last. */
        get: operations["Instances_ListInstances"];
        put?: never;
        /**
         * Creates a version of an instance and tags it latest. If the same definition exists already, only moves the tags
         *     to that version.
         */
        post: operations["Instances_ApplyInstance"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/instances/{slug}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Returns a version. A digest also finds removed versions, because sessions may have pinned them. */
        get: operations["Instances_GetInstance"];
        put?: never;
        post?: never;
        /** Hides an instance: new sessions cannot refer to it; sessions that pinned a version continue. */
        delete: operations["Instances_RemoveInstance"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/keys": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Lists the tenant's keys, including revoked ones. */
        get: operations["Keys_ListKeys"];
        put?: never;
        /** Creates a key. The response is the only one that contains the key itself. */
        post: operations["Keys_CreateKey"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/keys/{key_id}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        post?: never;
        /**
         * Revokes a key and all keys that descend from it. They are refused from the moment this call returns, and their
         *     open connections are closed within a second.
         */
        delete: operations["Keys_RevokeKey"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/limits": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Returns the tenant's own limits and its present use. */
        get: operations["Limits_GetLimits"];
        /** Sets a tenant's own limits and replaces its former ones. Only the root key may call this. */
        put: operations["Limits_SetLimits"];
        post?: never;
        /** Removes the tenant's own limits. Only the root key may call this. */
        delete: operations["Limits_RemoveLimits"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/openapi.json": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Returns this description. */
        get: operations["Operation_OpenAPI"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Lists sessions, newest first. A page token is valid only with the filter and sort of the request that returned
         *     it. A list sorted by updated changes while a client pages through it: sessions that are updated meanwhile move to
         *     the newest end.
         */
        get: operations["Sessions_ListSessions"];
        put?: never;
        /**
         * Creates a session. Its sandbox is created when the first message arrives. The header Idempotency-Key (gRPC
         *     metadata idempotency-key) makes a retry safe.
         */
        post: operations["Sessions_CreateSession"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{sessionId}/events/stream": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Streams a session's events as server-sent events.
         * @description id: is the seq, event: the type, data: the event. Text in flight (text_delta) has no id. A comment is sent every 15 seconds. Event `lag` reports that the read models are behind, event `problem` why the stream ended. A replay also sends `replay_started`, `gap_shortened`, `block_whole` and `replay_ended`; docs/replay.md describes their fields.
         */
        get: operations["Events_Stream"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{sessionId}/files": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Lists the files of the last snapshot of the workspace, or returns them as a tar.
         * @description With Accept: application/x-tar the response is a tar of everything below the folder. The snapshot was taken at the end of the last turn or later; POST /api/sessions/{sessionId}/sync takes one now. With live=1 the listing is read from the running sandbox: a tar is not available, up to 20,000 entries are returned with path, kind (file or dir), size and modTime, and snapshot is empty.
         */
        get: operations["Files_List"];
        /**
         * Extracts a tar into the workspace.
         * @description The archive is applied before the next turn, or immediately while a turn runs; the event files_applied reports this, with the entries that were refused. Up to --max-file bytes.
         */
        put: operations["Files_PutArchive"];
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{sessionId}/files/{path}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Returns a file of the last snapshot, as an attachment.
         * @description The path may contain slashes. Supports Range (one range) and If-None-Match. With live=1 the file is read from the running sandbox, up to 64 MiB, without Range and If-None-Match; links inside the workspace are followed.
         */
        get: operations["Files_Get"];
        /**
         * Puts a file into the workspace and creates missing folders.
         * @description The file is written before the next turn, or immediately while a turn runs. Up to --max-file bytes; the length of the body may be unknown.
         */
        put: operations["Files_Put"];
        post?: never;
        /** Removes a file, or a folder with everything below it, from the workspace. */
        delete: operations["Files_Delete"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Returns a session. */
        get: operations["Sessions_GetSession"];
        put?: never;
        post?: never;
        /** Deletes a session permanently: the running execution is cancelled and queued executions are removed. */
        delete: operations["Sessions_DeleteSession"];
        options?: never;
        head?: never;
        /** Changes the options, the metadata, or both. Absent fields keep their values. */
        patch: operations["Sessions_UpdateSession"];
        trace?: never;
    };
    "/api/sessions/{session_id}/blocks": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Lists a session's blocks, including text in flight: all of them in display order, or, with order newest, one page
         *     in reverse display order.
         */
        get: operations["Events_ListBlocks"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}/blocks/{block_id}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Returns a whole block, including text in flight. */
        get: operations["Events_GetBlock"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}/compare": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Compares two sessions event by event and returns the first difference. Ids, times, durations, costs, and fields
         *     that only describe where a session runs are ignored.
         */
        get: operations["Sessions_CompareSessions"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}/conversations": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Lists the conversations of a session: main, the agent's own conversation, and the conversations of its sub-agents. */
        get: operations["Sessions_ListConversations"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}/diff": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Compares the states of a session after two of its events: blocks, statuses, usage and files. */
        get: operations["Sessions_DiffSession"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}/environment/terminate": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Ends the session's sandbox and everything that runs in it immediately. The session stays open: its next message
         *     runs in a new sandbox with the workspace of the last snapshot.
         */
        post: operations["Sessions_TerminateEnvironment"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}/events": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Lists stored events in order of seq. Text in flight is not included; streams and blocks include it. */
        get: operations["Events_ListEvents"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}/executions": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Lists the executions of a session in the order they were queued. */
        get: operations["Executions_ListSessionExecutions"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}/fork": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Forks a session: creates a session that continues after one event of this session, with its history, files and
         *     agent conversation up to that event. This session and its log do not change. If the agent's conversation cannot
         *     be cut at that event, the fork begins at the last earlier event where it can be cut; the response returns that
         *     event. The header Idempotency-Key (gRPC metadata idempotency-key) makes a retry safe.
         */
        post: operations["Sessions_ForkSession"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}/history": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Lists the stored events that a fork inherits from its ancestors, starting at the first event of the oldest
         *     ancestor. Each event has the id of its own session and its seq there. The list is empty if the session is not a
         *     fork.
         */
        get: operations["Events_ListHistory"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}/history/blocks": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Lists the blocks that a fork inherits from its ancestors, in their state at the event at which each ancestor was
         *     forked.
         */
        get: operations["Events_ListHistoryBlocks"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}/interrupt": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Asks the running turn to stop; the agent's process stays warm. If no turn is running, nothing changes. */
        post: operations["Sessions_InterruptSession"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}/messages": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Posts a message, which creates an execution. The execution starts after the session's earlier executions have
         *     ended. The header Idempotency-Key (gRPC metadata idempotency-key) makes a retry safe. With wait, the answer comes
         *     when the execution ends or the time is up: 200 over REST if the execution has ended, otherwise 202.
         */
        post: operations["Sessions_PostMessage"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}/state": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Returns the state of a session directly after one of its events. Blocks that were still open contain the text
         *     that arrived before the next event, for as long as text in flight is stored: 24 hours by default.
         */
        get: operations["Sessions_GetSessionState"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}/sync": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Requests a snapshot of the workspace now. The snapshot is complete when a workspace_synced event with a later
         *     position exists.
         */
        post: operations["Sessions_SyncSession"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/sessions/{session_id}/timeline": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Returns a summary of a session over time: the number of events of each lane in periods of equal length, and marks
         *     for errors, approval requests and executions.
         */
        get: operations["Events_GetTimeline"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/signin/codes": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Creates a code, which can be exchanged once and within 60 seconds. The session credential has the rights of the
         *     caller's key, and is refused when the key is. A session credential cannot create codes.
         */
        post: operations["SignIn_CreateSignInCode"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/signin/session": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Returns who is signed in: the caller's tenant, role and key, and the CSRF token of its session cookie. */
        get: operations["SignIn_GetSignInSession"];
        put?: never;
        post?: never;
        /**
         * Ends the caller's session, and the streams that it opened. INVALID_REQUEST for a caller with an API key, which has
         *     no session.
         */
        delete: operations["SignIn_DeleteSignInSession"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/signin/sessions": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Exchanges a code or an API key for a session credential or a session cookie. The code or the key in the body proves
         *     the caller. Without both, the API key in the header Authorization does; otherwise the header is ignored. A code that
         *     was exchanged, has expired or never existed is refused with UNAUTHENTICATED. An address with too many refused
         *     sign-ins is refused with RATE_LIMITED.
         */
        post: operations["SignIn_ExchangeSignInCode"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/skills": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Lists the latest version of each skill, without its document, sorted by scope, org and slug; platform entries
         *     come last.
         */
        get: operations["Skills_ListSkills"];
        put?: never;
        /**
         * Pushes a skill: creates a version from a ZIP with a SKILL.md at its root. The SHA-256 identifies the version.
         * @description Up to 100 MiB; the length of the body may be unknown. Pushing the same ZIP again yields the same version. Only the root key may push to scope platform.
         */
        post: operations["Skills_Push"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/skills/{slug}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Returns a version with its document. */
        get: operations["Skills_GetSkill"];
        put?: never;
        post?: never;
        /** Hides a skill, or one version of it. */
        delete: operations["Skills_RemoveSkill"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/skills/{slug}/archive": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Returns the ZIP of a version, as an attachment.
         * @description Supports Range (one range) and If-None-Match; the ETag is the SHA-256.
         */
        get: operations["Skills_Archive"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/skills/{slug}/tags": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Moves a tag to a version. */
        post: operations["Skills_TagSkill"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/transcripts": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Uploads a transcript of Claude Code, Codex or OpenCode that a new session can continue.
         * @description The body is a session file of Claude Code, a rollout file of Codex, or the output of `opencode export`: up to --max-transcript bytes; its length may be unknown. It is checked while it is received. POST /api/sessions and POST /api/executions accept the `transcript` of the response for 10 minutes.
         */
        post: operations["Transcripts_Put"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/ws": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Opens a WebSocket that streams the events of the sessions that the client joins.
         * @description The connection is authenticated by the header Authorization, by a session cookie, or, with auth=message, by its first message: {"type":"authenticate","requestId","key"} with an API key or a session credential, within 10 seconds; the answer is authenticated{requestId}, or an error and the close code 1008. Send {"type":"session:join","requestId","sessionId","after","metadata"} (metadata false omits it from the events) {"type":"session:leave","requestId","sessionId"} and {"type":"approval:decide","requestId","sessionId","approvalId","decision","arguments","comment","answers","content"} (as DecideApproval; sessionId may be left out). Receive session:joined{requestId,sessionId,seq}, session:event{sessionId,event}, session:lag{sessionId,lagging,lagMs}, session:snapshot{sessionId,seq,blocks}, session:left{sessionId,seq}, approval:decided{requestId,sessionId,approvalId,position}, error{code,message,requestId,sessionId,field,tip}.
         */
        get: operations["Events_WebSocket"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/health": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Responds while the process is alive; an alias of /healthz. */
        get: operations["Operation_Health"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/metrics": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Returns metrics in the Prometheus text format. */
        get: operations["Operation_Metrics"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/readyz": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Reports whether NATS, Postgres and the read models are available. */
        get: operations["Operation_Ready"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
}
export type webhooks = Record<string, never>;
export interface components {
    schemas: {
        FileAccepted: {
            /** @description Position of the change in the log. */
            position: string;
            /** @description SHA-256 of the content, in hex. */
            sha256: string;
            /** @description Size in bytes. */
            size: number;
        };
        FileChange: {
            position: string;
        };
        FileEntry: {
            /** @description The ETag of the file's own route: equal content has an equal ETag. */
            etag?: string;
            /** @description The execution during which the entry changed last, if the log recorded it. */
            executionId?: string;
            /** @enum {string} */
            kind: "file" | "dir" | "symlink";
            /** Format: date-time */
            modTime?: string;
            /** @description Permission bits: 420 is 0644. */
            mode: number;
            /** @description Path relative to the workspace. */
            path: string;
            /** @description The bytes of the path in base64, if it is not valid UTF-8. */
            pathBase64?: string;
            /** @description SHA-256 of the content, in hex; only for files of up to 1 MiB. */
            sha256?: string;
            /** @description Size in bytes. */
            size: number;
            /** @description Target of a symbolic link. Links are not followed. */
            target?: string;
        };
        FileListing: {
            /**
             * Format: date-time
             * @description When the snapshot was taken.
             */
            at: string;
            files: components["schemas"]["FileEntry"][];
            /** @description The snapshot that contains the files. */
            snapshot: string;
        };
        Problem: {
            /** @description Stable error code. */
            code: string;
            /** @description One sentence for the user. */
            detail: string;
            /** @description The invalid field. */
            field?: string;
            /** @description The Idempotency-Key that makes a retry safe, if the outcome of a command is unknown. */
            idempotencyKey?: string;
            status: number;
            /** @description Seq of the session's last event, if a cursor is not valid. */
            tip?: number;
            title: string;
            type: string;
        };
        Readiness: {
            checks?: {
                [key: string]: string;
            };
            ready?: boolean;
        };
        /** @description A reference in object form: it names a catalogue entry, or a version of one. */
        ReferenceObject: {
            /**
             * @description The kind of entry that the field refers to; optional.
             * @enum {unknown}
             */
            kind?: "agent" | "instance" | "environment" | "skill";
            /** @description An organization within the tenant, or the account. */
            org?: string;
            /**
             * @description Absent means organization.
             * @enum {unknown}
             */
            scope?: "platform" | "organization" | "identity_account";
            slug: string;
            /** @description latest (the default), a tag, or a digest. */
            version?: string;
        };
        SkillPushed: {
            /** @description Position of the commit in the log; absent after a dry run. */
            position?: string;
            ref: components["schemas"]["spool.v1.Reference"];
            /** @description Whether the version existed already. */
            same: boolean;
            skill: {
                /** @description Size of the ZIP in bytes. */
                bytes: number;
                /** @description Description in the front matter. */
                description: string;
                files: number;
                /** @description Name in the front matter. */
                name: string;
                /** @description Total size of its files in bytes. */
                unpackedBytes: number;
            };
        };
        TranscriptAccepted: {
            /** @description The id of the agent's own session in the transcript. */
            agentSessionId?: string;
            /** @enum {unknown} */
            architecture?: "claude-code" | "codex" | "opencode";
            /** Format: date-time */
            at?: string;
            /** @description Number of messages of the user and the agent. */
            messages?: number;
            sha256?: string;
            /** @description Size in bytes. */
            size?: number;
            /** @description The reference of the transcript: the id of the session that will continue it. */
            transcript?: string;
        };
        /** @description A session from which another session was forked. */
        "spool.v1.Ancestor": {
            /** @description Seq of the last event that is inherited from this session. */
            effective?: number;
            sessionId?: string;
        };
        "spool.v1.ApplyResponse": {
            /** @description Position of the commit; empty if nothing had to be written. */
            position?: string;
            /** @description The reference with the current version. */
            ref?: components["schemas"]["spool.v1.Reference"];
            /** @description Whether the version existed already. */
            same?: boolean;
        };
        /** @description An approval request. */
        "spool.v1.Approval": {
            approvalId?: string;
            /**
             * @description Why the request ended: person, class (a person approved all requests of the class) or timeout. Of a retracted
             *     request: withdrawn, turn_ended, attempt_failed or execution_ended.
             */
            cause?: string;
            /** @description The conversation of the agent, or of the sub-agent, that asks. */
            conversationId?: string;
            /** @description The data of the event approval_decided. Absent in SessionState. */
            decided?: components["schemas"]["spool.v1.Json"];
            /** Format: date-time */
            decidedAt?: string;
            /** @description Who decided, without name, address and service. */
            decidedBy?: components["schemas"]["spool.v1.AuditActor"];
            decidedSeq?: number;
            /** @description approve, approve_all, skip, reject or answer; absent if no person has decided. */
            decision?: string;
            /** Format: date-time */
            endedAt?: string;
            endedSeq?: number;
            executionId?: string;
            /** @description tool, plan, question or elicitation. */
            kind?: string;
            /** @description The data of the event approval_requested. Absent in SessionState. */
            request?: components["schemas"]["spool.v1.Json"];
            /** Format: date-time */
            requestedAt?: string;
            /** @description Seqs of the events that requested, decided and ended it, with their times. */
            requestedSeq?: number;
            sessionId?: string;
            /**
             * @description pending, decided (the agent has not received the decision yet), approved, rejected, skipped, answered or retracted
             *     (it ended without a decision).
             */
            status?: string;
            /** @description One line that describes the request. */
            title?: string;
            toolName?: string;
            toolUseId?: string;
        };
        "spool.v1.AuditActor": {
            /** @description The client's IP address, as seen by the gateway. Absent, like user and service, in commits from before version 2. */
            address?: string;
            id?: string;
            keyId?: string;
            /** @description Absent for the root key. */
            keyName?: string;
            /** @description key, user (on servers without keys), or service for work that a service did for a client. */
            kind?: string;
            /** @description The service and replica that wrote the commit. */
            service?: string;
            /** @description The application's end user, as the client stated it in Spool-User. */
            user?: string;
        };
        "spool.v1.AuditEntry": {
            /** @description The API key, or the reference of the catalogue entry, that the commit concerns. */
            about?: string;
            actor?: components["schemas"]["spool.v1.AuditActor"];
            /**
             * @description The aspect of the log that was written: life for a session, otherwise key, agent, instance, environment, skill,
             *     budget or limits.
             */
            aspect?: string;
            executionId?: string;
            /** @description Position of the commit in the log. */
            position?: string;
            /** @description Absent if the commit does not concern a session. */
            sessionId?: string;
            /**
             * Format: date-time
             * @description When the log stored the commit.
             */
            time?: string;
            /** @description Types of the commit's events, without duplicates. */
            types?: string[];
        };
        /** @description A unit to display. kind determines which fields are set. */
        "spool.v1.Block": {
            /**
             * @description The agent's own position directly after a completed block, at which a fork can cut its conversation; absent if it
             *     cannot be cut there.
             */
            anchor?: string;
            /** @description error. */
            code?: string;
            /** @description user_message, assistant_text, thinking: the whole text so far. */
            content?: string;
            conversationId?: string;
            /** @description tool_use. */
            description?: string;
            /** @description tool_use. */
            displayName?: string;
            /** @description tool_result, subagent. */
            durationMs?: number;
            executionId?: string;
            id?: string;
            /** @description tool_use, subagent: the arguments, set once they are complete. */
            input?: components["schemas"]["spool.v1.Json"];
            /** @description tool_result. */
            isError?: boolean;
            /**
             * @description user_message, assistant_text, thinking, tool_use, tool_result, subagent, plan, step, skill_load, system or error;
             *     todo in sessions of earlier versions.
             */
            kind?: string;
            /** @description system, error. */
            message?: string;
            /** @description assistant_text. */
            model?: string;
            /** @description subagent. */
            name?: string;
            /** @description tool_result, subagent. */
            output?: string;
            /** @description user_message with images: replaces content. Absent when empty. */
            parts?: components["schemas"]["spool.v1.Part"][];
            /** @description plan: the whole plan. */
            plan?: components["schemas"]["spool.v1.Plan"];
            /** @description skill_load. */
            skill?: components["schemas"]["spool.v1.LoadedSkill"];
            /** @description pending, complete or error. */
            status?: string;
            /** @description step. */
            step?: components["schemas"]["spool.v1.Step"];
            /** @description subagent. */
            subagentId?: string;
            /** @description system. */
            subtype?: string;
            /** @description thinking. */
            summary?: string;
            /** Format: date-time */
            timestamp?: string;
            /** @description todo; plan: the items of the plan. Absent when empty. */
            todos?: components["schemas"]["spool.v1.TodoItem"][];
            /** @description tool_use. */
            toolName?: string;
            /** @description tool_use, tool_result, subagent, skill_load: the agent's own id of the call. */
            toolUseId?: string;
        };
        "spool.v1.BlockChange": {
            /** @description The block after the second event. */
            block?: components["schemas"]["spool.v1.Block"];
            /** @description added (the block began), completed (it was open and became final) or changed. */
            change?: string;
        };
        /** @description Limits on what a session or a tenant may use; 0 means no limit. */
        "spool.v1.Budget": {
            /**
             * Format: double
             * @description Cost in dollars.
             */
            costUsd?: number;
            /**
             * Format: double
             * @description Running time of executions, in milliseconds.
             */
            timeMs?: number;
            /**
             * Format: double
             * @description Input and output tokens, including cache tokens.
             */
            tokens?: number;
            /** @description Number of executions that are started. */
            turns?: number;
        };
        "spool.v1.CancelExecutionResponse": {
            position?: string;
        };
        "spool.v1.Conversation": {
            conversationId?: string;
            durationMs?: number;
            /** Format: date-time */
            endedAt?: string;
            executionId?: string;
            name?: string;
            /** @description The conversation that spawned this one; absent for main. */
            parentConversationId?: string;
            /** Format: date-time */
            startedAt?: string;
            /** @description running, completed or failed; main is running while an execution runs. */
            status?: string;
            subagentId?: string;
            toolUseId?: string;
        };
        "spool.v1.CreateKeyResponse": {
            /** @description The only agents that the key may use; empty means all. */
            agents?: string[];
            /**
             * Format: date-time
             * @description Absent if the key does not expire.
             */
            expiresAt?: string;
            /** @description The key itself, which only this response contains. */
            key?: string;
            keyId?: string;
            name?: string;
            position?: string;
            /** @description The key's first characters. */
            prefix?: string;
            role?: string;
            tenant?: string;
        };
        "spool.v1.CreateSessionResponse": {
            /** @description The position of the commit in the log. A read with this minPosition waits for it. */
            position?: string;
            sessionId?: string;
        };
        "spool.v1.CreateSignInCodeResponse": {
            /**
             * @description The code, spool_sc_…. Only this response contains it. A page receives it in the fragment of its URL, #code=…, which a
             *     browser does not send to servers.
             */
            code?: string;
            /** @description How long the code can be exchanged, in milliseconds. */
            validMs?: number;
        };
        "spool.v1.CurrentSandbox": {
            /** Format: date-time */
            createdAt?: string;
            /**
             * Format: double
             * @description Disk use of the workspace and the agent's records at the last check, in bytes: a whole number.
             */
            diskBytes?: number;
            /** Format: date-time */
            endedAt?: string;
            engine?: string;
            /** @description healthy or unhealthy; absent before the first check. */
            health?: string;
            image?: string;
            /**
             * Format: double
             * @description Memory of the agent's processes at the last check, in bytes: a whole number.
             */
            memoryBytes?: number;
            provider?: string;
            /** @description Why the sandbox is unhealthy, or why it ended. */
            reason?: string;
            sandboxId?: string;
            /** @description creating, ready, paused, replaced, terminated or failed. */
            state?: string;
        };
        "spool.v1.DeadLetter": {
            /** @description Number of deliveries. */
            delivered?: number;
            /** @description The handler that stopped retrying. */
            handler?: string;
            /** @description A number that increases with each letter. */
            id?: string;
            /** @description The message itself; absent in lists. */
            message?: string;
            /** @description The reason in one sentence. */
            reason?: string;
            /** @description Whether the letter can be retried. */
            retryable?: boolean;
            /** @description The session that the message concerns; empty if it names none. */
            sessionId?: string;
            /** @description The NATS subject that the message was published to. */
            subject?: string;
            /**
             * Format: date-time
             * @description When the consumer stopped retrying the message.
             */
            time?: string;
        };
        "spool.v1.DecideApprovalResponse": {
            /** @description Position of the decision in the log. */
            position?: string;
        };
        /** @description A version of an agent, an instance or an environment. */
        "spool.v1.Definition": {
            /** Format: date-time */
            createdAt?: string;
            ref?: components["schemas"]["spool.v1.Reference"];
            /** @description The definition as it was applied. A secret contains only the key under which its encrypted value is stored. */
            spec?: components["schemas"]["spool.v1.Json"];
            /** @description The tags of this version, which may include latest. */
            tags?: string[];
        };
        "spool.v1.DeleteSessionResponse": {
            position?: string;
            sessionId?: string;
        };
        "spool.v1.DeleteSignInSessionResponse": Record<string, never>;
        "spool.v1.DropDeadLetterResponse": {
            id?: string;
        };
        "spool.v1.Event": {
            /** @description main, or the id of a sub-agent's conversation; absent if the event does not concern a conversation. */
            conversationId?: string;
            /** @description The event's data, which depends on its type: see docs/events.md. */
            data?: components["schemas"]["spool.v1.Json"];
            executionId?: string;
            /** @description Absent on a text_delta. */
            id?: string;
            /** @description The application's metadata. Absent if there is none, on a text_delta, and if the request omits it. */
            metadata?: components["schemas"]["spool.v1.EventMetadata"];
            position?: string;
            /** @description The event's number in the session: 1, 2, 3, … A text_delta has the seq of the last stored event. */
            seq?: number;
            sessionId?: string;
            /** @description runner or server. */
            source?: string;
            /** Format: date-time */
            time?: string;
            type?: string;
        };
        /**
         * @description The application's metadata as it was when the event was appended. A later change of the session's metadata affects
         *     only later events.
         */
        "spool.v1.EventMetadata": {
            /**
             * @description Metadata of the message that the event's execution processes; absent if the message has none, or if the event
             *     belongs to no execution.
             */
            message?: components["schemas"]["spool.v1.Json"];
            /** @description The session's metadata; absent if it has none. */
            session?: components["schemas"]["spool.v1.Json"];
        };
        "spool.v1.ExchangeSignInCodeResponse": {
            /**
             * @description The session credential, spool_ss_…, which is sent as an API key is: Authorization: Bearer spool_ss_…. Only this
             *     response contains it. Empty if the response has a session cookie.
             */
            credential?: string;
            /**
             * @description The CSRF token of the session cookie. Every request with the cookie other than GET, HEAD and OPTIONS needs it in
             *     the header X-CSRF-Token. Empty without a session cookie.
             */
            csrfToken?: string;
            /**
             * Format: date-time
             * @description When the session ends at the latest. A session cookie also ends after 8 hours without a request.
             */
            expiresAt?: string;
            role?: string;
            tenant?: string;
        };
        "spool.v1.Execution": {
            /** @description Slug of the session's agent. */
            agent?: string;
            /** @description The session's agent with its pinned version; absent for the built-in agent. */
            agentRef?: string;
            /** @description Architecture of the session. */
            architecture?: string;
            /** @description Number of times that the agent was started. */
            attempt?: number;
            /** @description Error code of a failed execution. */
            code?: string;
            /**
             * Format: double
             * @description Cost as the agent reports it.
             */
            costUsd?: number;
            /** Format: date-time */
            dispatchedAt?: string;
            durationMs?: number;
            /** Format: date-time */
            endedAt?: string;
            executionId?: string;
            /** @description The executor that claimed the execution last. */
            executor?: string;
            /** @description Seq of the execution's first event. */
            firstSeq?: number;
            /** @description The session's agent instance with its version; absent for the built-in agent. */
            instance?: string;
            /** @description Error message of a failed execution. */
            message?: string;
            metadata?: components["schemas"]["spool.v1.Json"];
            /**
             * @description Usage of the execution's model requests as metered by the egress proxy, by provider, model and day; empty if
             *     nothing was metered.
             */
            metered?: components["schemas"]["spool.v1.MeteredUsage"][];
            /**
             * Format: double
             * @description Sum of the metered costs.
             */
            meteredCostUsd?: number;
            model?: string;
            /** @description queued, starting, running, waiting_for_approval, paused, completed, failed or cancelled. */
            phase?: string;
            /** @description The beginning of the message that the execution processes, up to 1000 characters. */
            query?: string;
            /** Format: date-time */
            queuedAt?: string;
            /** @description Reason of a cancelled execution. */
            reason?: string;
            /** @description The failed execution that this one continues; absent if this one was not created by RecoverExecution. */
            recoveredFrom?: string;
            /**
             * @description The agent, environments, variables and skills of the execution as resolved at its start: the data of
             *     execution_resolved. Absent before that event.
             */
            resolved?: components["schemas"]["spool.v1.Json"];
            /** @description The agent's final message. */
            result?: string;
            /**
             * Format: double
             * @description Cost of that sandbox time at the executor's price; 0 if the executor has no price.
             */
            sandboxCostUsd?: number;
            /**
             * Format: double
             * @description Milliseconds that the session's sandboxes ran during the execution, for metered sandbox providers: a whole number.
             *     Known when the execution ends.
             */
            sandboxMs?: number;
            sessionId?: string;
            /** Format: date-time */
            startedAt?: string;
            /**
             * Format: date-time
             * @description Time of the execution's last change: when it was queued, dispatched, started or ended.
             */
            updatedAt?: string;
            usage?: components["schemas"]["spool.v1.Usage"];
            /**
             * @description Why the execution does not make progress at present. Only GetExecution sets it, and only while the reason is known: it
             *     is absent if the execution has ended, runs, or starts.
             */
            waiting?: components["schemas"]["spool.v1.Waiting"];
        };
        /** @description Adapts the permission policy of the agent to one execution. */
        "spool.v1.ExecutionPermissions": {
            /** @description They come before the rules of the agent. */
            rules?: components["schemas"]["spool.v1.PermissionRule"][];
            /** @description Nobody is there to decide: requests that a person would decide are denied or skipped, as the agent's policy says. */
            unattended?: boolean;
        };
        "spool.v1.ExplainEnvironmentResponse": {
            /**
             * @description The hosts that sandboxes could reach in addition to model APIs: the hosts of the agent, then the hosts of each
             *     environment, without duplicates.
             */
            egress?: components["schemas"]["spool.v1.ExplainedHost"][];
            /** @description The variables, sorted by name. */
            variables?: components["schemas"]["spool.v1.ExplainedVariable"][];
        };
        "spool.v1.ExplainedHost": {
            /** @description host, host:port or *.host, after a list of methods and a space if not all methods are allowed. */
            entry?: string;
            /** @description agent, or the reference of the first environment that allows the host. */
            from?: string;
        };
        "spool.v1.ExplainedVariable": {
            /** @description agent, or the reference of an environment. */
            from?: string;
            name?: string;
            secret?: boolean;
            /** @description Absent for a secret. */
            value?: string;
        };
        /** @description A file event. */
        "spool.v1.FileChange": {
            executionId?: string;
            path?: string;
            seq?: number;
            /**
             * Format: double
             * @description Size in bytes: a whole number. 0 for a file that was removed.
             */
            size?: number;
            /** Format: date-time */
            time?: string;
            /** @description Type of the event. */
            type?: string;
        };
        "spool.v1.FileDiff": {
            /** @description added, removed or changed. */
            change?: string;
            /** @description Absent if the file does not exist on that side. */
            from?: components["schemas"]["spool.v1.FileVersion"];
            /** @description Why there is no text: binary, too_large (256 KiB), mode (only the mode or kind differs) or cut. */
            omitted?: string;
            path?: string;
            /** @description A unified diff of a text file, with three lines of context. */
            text?: string;
            to?: components["schemas"]["spool.v1.FileVersion"];
        };
        "spool.v1.FileVersion": {
            /** @description file or symlink. */
            kind?: string;
            mode?: number;
            /** @description SHA-256 of the content, for binary files of up to 64 MiB. */
            sha256?: string;
            /**
             * Format: double
             * @description Size in bytes: a whole number.
             */
            size?: number;
            /** @description Target of a symlink. */
            target?: string;
        };
        /** @description The differences between the snapshots of two events. */
        "spool.v1.FilesDiff": {
            /** @description Whether some texts are missing because of the limits of the whole response: 100 texts, 1 MiB. */
            cut?: boolean;
            /** @description Number of all files that differ. */
            fileCount?: number;
            /** @description The first 1000 differences, sorted by path. */
            files?: components["schemas"]["spool.v1.FileDiff"][];
            /** @description Seq of each snapshot's event; 0 for none. */
            fromSnapshotSeq?: number;
            /** @description The sessions that the snapshots belong to, if these are ancestors. */
            fromSnapshotSession?: string;
            /** @description Whether the files could not be compared because a snapshot was removed. */
            snapshotGone?: boolean;
            /** @description What was compared, or why a comparison was not possible, in one sentence. */
            summary?: string;
            toSnapshotSeq?: number;
            toSnapshotSession?: string;
        };
        "spool.v1.ForkSessionResponse": {
            /** @description Where the fork begins. */
            parent?: components["schemas"]["spool.v1.ParentSession"];
            /** @description The position of the commit in the log. A read with this minPosition waits for it. Empty for a preview. */
            position?: string;
            /** @description The new session; empty for a preview. */
            sessionId?: string;
        };
        "spool.v1.GetBlockResponse": {
            block?: components["schemas"]["spool.v1.Block"];
            /** @description Seq of the last event that is folded into the block. */
            tip?: number;
        };
        "spool.v1.GetLimitsResponse": {
            /** @description The tenant's own limits. For a field of 0 the setting of the service that enforces it applies. */
            limits?: components["schemas"]["spool.v1.TenantLimits"];
            tenant?: string;
            /** @description The tenant's present use. Streams and request rates are counted by each gateway and not included. */
            used?: components["schemas"]["spool.v1.TenantLimits"];
        };
        /** @description An open block whose text up to the event is incomplete. */
        "spool.v1.IncompleteText": {
            blockId?: string;
            /** @description Number of bytes of the text that are included, from its beginning. */
            shownBytes?: number;
        };
        "spool.v1.InheritedBlocks": {
            blocks?: components["schemas"]["spool.v1.Block"][];
            /** @description Seq of the last event that is folded into the blocks. */
            effective?: number;
            sessionId?: string;
        };
        "spool.v1.InterruptSessionResponse": {
            position?: string;
        };
        /** @description Any JSON value, preserved byte for byte. Over REST the value itself takes the place of this message. */
        "spool.v1.Json": unknown;
        "spool.v1.Key": {
            /** @description Slugs of the only agents that the key may use; empty means all. */
            agents?: string[];
            /** Format: date-time */
            createdAt?: string;
            /**
             * @description The id of the key that created it; absent if the root key created it, and for keys from builds that did not
             *     record it.
             */
            createdBy?: string;
            /**
             * Format: date-time
             * @description Absent if the key does not expire.
             */
            expiresAt?: string;
            keyId?: string;
            name?: string;
            prefix?: string;
            /**
             * Format: date-time
             * @description Absent if the key is not revoked.
             */
            revokedAt?: string;
            /** @description use, operate, or admin. Keys from builds without roles have role admin. */
            role?: string;
        };
        "spool.v1.ListAgentsResponse": {
            agents?: components["schemas"]["spool.v1.Definition"][];
            /** @description Empty on the last page. */
            nextPageToken?: string;
        };
        "spool.v1.ListApprovalsResponse": {
            approvals?: components["schemas"]["spool.v1.Approval"][];
            /** @description Empty on the last page. */
            nextPageToken?: string;
        };
        "spool.v1.ListAuditResponse": {
            entries?: components["schemas"]["spool.v1.AuditEntry"][];
            /** @description Empty on the last page. */
            nextPageToken?: string;
        };
        "spool.v1.ListBlocksResponse": {
            blocks?: components["schemas"]["spool.v1.Block"][];
            /** @description With order newest: the value of before for the next page; empty on the last page. */
            next?: string;
            /**
             * @description Seq of the last event that is folded into the blocks. A stream with this cursor continues from the blocks without a
             *     gap: an event with a seq up to tip, and text before the end of a block's content, is contained in them.
             */
            tip?: number;
            /**
             * @description With order newest: fields of blocks of this page that are longer than 8 KiB and were cut. GetBlock returns them
             *     whole. The content of a pending block is never cut.
             */
            truncated?: components["schemas"]["spool.v1.TruncatedField"][];
        };
        "spool.v1.ListBudgetsResponse": {
            budgets?: components["schemas"]["spool.v1.TenantBudget"][];
        };
        "spool.v1.ListConversationsResponse": {
            conversations?: components["schemas"]["spool.v1.Conversation"][];
        };
        "spool.v1.ListDeadLettersResponse": {
            deadLetters?: components["schemas"]["spool.v1.DeadLetter"][];
            /** @description Empty on the last page. */
            nextPageToken?: string;
        };
        "spool.v1.ListEnvironmentsResponse": {
            environments?: components["schemas"]["spool.v1.Definition"][];
            /** @description Empty on the last page. */
            nextPageToken?: string;
        };
        "spool.v1.ListEventsResponse": {
            events?: components["schemas"]["spool.v1.Event"][];
            /** @description The cursor of the next page; equal to tip when there are no more events. */
            next?: number;
            /** @description Seq of the session's last event. */
            tip?: number;
        };
        "spool.v1.ListExecutionsResponse": {
            executions?: components["schemas"]["spool.v1.Execution"][];
            /** @description Empty on the last page. */
            nextPageToken?: string;
        };
        "spool.v1.ListHistoryBlocksResponse": {
            /** @description The ancestors, oldest first. An ancestor whose blocks span several pages appears on each of them. */
            ancestors?: components["schemas"]["spool.v1.InheritedBlocks"][];
            /** @description Empty on the last page. */
            nextPageToken?: string;
        };
        "spool.v1.ListHistoryResponse": {
            /** @description The ancestors, oldest first. */
            ancestors?: components["schemas"]["spool.v1.Ancestor"][];
            events?: components["schemas"]["spool.v1.Event"][];
            /** @description The cursor of the next page; equal to total when there are no more events. */
            next?: number;
            /** @description Number of events that the session inherits from its ancestors. */
            total?: number;
        };
        "spool.v1.ListInstancesResponse": {
            instances?: components["schemas"]["spool.v1.Definition"][];
            /** @description Empty on the last page. */
            nextPageToken?: string;
        };
        "spool.v1.ListKeysResponse": {
            keys?: components["schemas"]["spool.v1.Key"][];
        };
        "spool.v1.ListSessionsResponse": {
            /** @description Empty on the last page. */
            nextPageToken?: string;
            sessions?: components["schemas"]["spool.v1.Session"][];
        };
        "spool.v1.ListSkillsResponse": {
            /** @description Empty on the last page. */
            nextPageToken?: string;
            skills?: components["schemas"]["spool.v1.Skill"][];
        };
        /** @description A skill whose instructions the agent has read. */
        "spool.v1.LoadedSkill": {
            name?: string;
            /** @description Folder of the skill, where the agent names it or Spool knows it. */
            path?: string;
            /** @description SHA-256 of the ZIP; absent for a skill that was not pushed to Spool. */
            version?: string;
        };
        /** @description Usage of requests to one model on one day (UTC). */
        "spool.v1.MeteredUsage": {
            /** Format: double */
            costUsd?: number;
            /** @description The day, such as 2026-01-31. */
            day?: string;
            /** @description Milliseconds from the request to the last byte of the response, summed over all requests. */
            durationMs?: number;
            /** @description Requests without a response, or with a response status of 400 or above. */
            failed?: number;
            /** @description Milliseconds from the request to the first byte of the response, summed over all requests. */
            firstByteMs?: number;
            model?: string;
            /** @description Version of the price table; empty if the table has no price for the model. */
            prices?: string;
            /** @description anthropic, openai, nvidia, or the name of a custom host. */
            provider?: string;
            requests?: number;
            usage?: components["schemas"]["spool.v1.Usage"];
        };
        /**
         * @description How an agent of architecture acp receives its model. In values, ${MODEL} is replaced by the model,
         *     ${MODEL_BASE_URL} by the base URL of its API and ${MODEL_KEY} by the key; $$ is a dollar sign.
         */
        "spool.v1.ModelSettings": {
            /**
             * @description Arguments that are appended to the command. They must not contain the key, because other processes could read it
             *     there.
             */
            args?: string[];
            /**
             * @description Environment variables of the agent's process; they override those of the preset. A variable that contains
             *     ${MODEL} is left out if the session has no model.
             */
            env?: {
                [key: string]: string;
            };
            /** @description The name of a known agent whose settings are used: claude, opencode or qwen. */
            preset?: string;
        };
        /** @description The event of the parent session at which a fork begins. */
        "spool.v1.ParentSession": {
            /** @description Seq of the requested event. */
            asked?: number;
            /**
             * @description What becomes of the agent's conversation. new: there is none at the event. continued: the agent continues a copy.
             *     unverified: the agent has to find its records in another folder; if it does not, the first turn fails with
             *     CONVERSATION_LOST. lost: the agent begins a new one. Empty for a fork of an earlier build.
             */
            conversation?: string;
            /** @description Seq of the last event that the fork inherits from the parent; at most asked. */
            effective?: number;
            /** @description Why effective is lower than asked; absent if they are equal. */
            reason?: string;
            sessionId?: string;
            /** @description The snapshot that the fork's files come from; absent for an empty workspace. */
            snapshot?: string;
            /** @description Seq of that snapshot's workspace_synced event; 0 if the snapshot belongs to an earlier ancestor. */
            snapshotSeq?: number;
        };
        /** @description A part of a message. */
        "spool.v1.Part": {
            /** @description The image in base64. */
            data?: string;
            /** @description Of an image: image/png, image/jpeg, image/gif or image/webp. */
            mediaType?: string;
            text?: string;
            /** @description text or image. */
            type?: string;
        };
        "spool.v1.PauseExecutionResponse": {
            position?: string;
        };
        /** @description A rule that decides the calls that it matches. A call must meet all conditions that are set. */
        "spool.v1.PermissionRule": {
            /** @description The command begins with the words of one of these. */
            command?: string[];
            /** @description Hosts that the call reaches: host or *.host. */
            host?: string[];
            /** @description Globs on the paths that the call names, relative to the workspace or absolute. */
            path?: string[];
            /** @description allow, ask or deny. */
            then?: string;
            /** @description Glob on the name of the tool; empty means every tool. */
            tool?: string;
        };
        /** @description The whole plan of a conversation: what the agent intends to do, and how far it is. */
        "spool.v1.Plan": {
            /** @description Why the plan is as it is, in the agent's words. */
            explanation?: string;
            /** @description The items in the agent's order. Absent when empty. */
            items?: components["schemas"]["spool.v1.PlanItem"][];
            title?: string;
        };
        "spool.v1.PlanItem": {
            content?: string;
            /** @description The agent's own id; absent if the agent has none. */
            id?: string;
            /** @description high, medium or low, where the agent ranks its items. */
            priority?: string;
            /** @description pending, in_progress, completed or cancelled. */
            status?: string;
        };
        "spool.v1.PostMessageResponse": {
            /**
             * @description With wait: seq of an event, as the cursor with which a client follows the session. It is the event that ended the
             *     execution, or, if the execution has not ended, an event before its end; 0 is the beginning of the session.
             */
            cursor?: number;
            /** @description With wait: the execution when it ended, or as it is after that time; absent if the read models do not have it yet. */
            execution?: components["schemas"]["spool.v1.Execution"];
            executionId?: string;
            position?: string;
            sessionId?: string;
        };
        "spool.v1.RecoverExecutionResponse": {
            /** @description The new execution. */
            executionId?: string;
            position?: string;
            sessionId?: string;
        };
        /** @description A reference to a catalogue entry, or to a version of one. */
        "spool.v1.Reference": {
            /** @description An organization within the tenant, or the account. */
            org?: string;
            /**
             * @description organization (or empty): an entry of the tenant; identity_account: an entry of the account that org names;
             *     platform: an entry that all tenants can read, and that is written with a key of tenant platform.
             */
            scope?: string;
            /** @description 1 to 64 characters: groups of a-z and 0-9 joined by single dots or hyphens. */
            slug?: string;
            /** @description Empty or latest, a tag, or a digest; in a response always the digest. */
            version?: string;
        };
        "spool.v1.RemoveBudgetResponse": {
            period?: string;
            position?: string;
            tenant?: string;
        };
        "spool.v1.RemoveLimitsResponse": {
            position?: string;
            tenant?: string;
        };
        "spool.v1.RemoveResponse": {
            position?: string;
        };
        /**
         * @description The versions to which an execution's references were resolved at its start. Variables and their values are not
         *     included.
         */
        "spool.v1.ResolvedVersions": {
            /** @description Absent for the built-in agent. */
            agent?: string;
            environments?: string[];
            executionId?: string;
            instance?: string;
            mcpServers?: string[];
            /** @description Seq of the execution_resolved event. */
            seq?: number;
            /** @description References with the SHA-256 as version. */
            skills?: string[];
        };
        "spool.v1.ResumeExecutionResponse": {
            position?: string;
        };
        "spool.v1.RetryDeadLetterResponse": {
            id?: string;
        };
        "spool.v1.RevokeKeyResponse": {
            keyId?: string;
            position?: string;
            /** @description Ids of the other keys that were revoked, because they descend from the key. */
            revoked?: string[];
        };
        /** @description A variable of one execution. */
        "spool.v1.RunVariable": {
            /** @description A secret value is encrypted on arrival, never returned, and removed from recorded output. */
            secret?: boolean;
            value?: string;
        };
        "spool.v1.Session": {
            /** @description Absent while no execution runs. */
            activeExecutionId?: string;
            agent?: string;
            /** @description The agent with the version that was pinned; absent for the built-in one. */
            agentRef?: string;
            /** @description The agent version that was pinned when the session was created. */
            agentVersion?: string;
            architecture?: string;
            /**
             * Format: double
             * @description Cost of the session's executions as the agents report it, without sandbox_cost_usd.
             */
            costUsd?: number;
            /** Format: date-time */
            createdAt?: string;
            /** @description The present sandbox, or the last one; absent before the first one. */
            currentSandbox?: components["schemas"]["spool.v1.CurrentSandbox"];
            /** @description References to environments, layered above the instance's environments. */
            environments?: string[];
            /** @description Number of executions so far. */
            executions?: number;
            /** @description Number of sessions that were forked from this one and are not deleted. */
            forks?: number;
            /** @description Whether the idle timeout has passed since the last turn. */
            idle?: boolean;
            /**
             * @description The agent instance with its version. If the session was created with an agent only, this is the agent's default
             *     instance. Absent for the built-in agent, and in sessions of Spool versions without default instances.
             */
            instance?: string;
            /** @description The failure of the execution that ended last; absent if that execution did not fail. */
            lastError?: components["schemas"]["spool.v1.SessionError"];
            metadata?: components["schemas"]["spool.v1.Json"];
            /** @description Number of approval requests that have not ended. */
            openApprovals?: number;
            /** @description Where a fork begins; absent if the session is not a fork. */
            parent?: components["schemas"]["spool.v1.ParentSession"];
            /**
             * @description waiting_for_approval (the active execution waits for a person's decision), running (it is starting, running or
             *     paused), queued (executions wait and none runs), failed (no execution is open and the one that ended last failed)
             *     or idle.
             */
            phase?: string;
            /**
             * Format: date-time
             * @description Time of the event that began the phase.
             */
            phaseSince?: string;
            /** @description Position of the last event. */
            position?: string;
            /** @description Number of queued executions. */
            queued?: number;
            /** @description The sandbox provider. */
            sandbox?: string;
            /**
             * Format: double
             * @description Cost of that sandbox time at the executor's price; 0 if the executor has no price.
             */
            sandboxCostUsd?: number;
            /**
             * Format: double
             * @description Milliseconds that the session's sandboxes have run, for metered sandbox providers: a whole number. The time since
             *     the last execution is added when the next execution or the sandbox ends.
             */
            sandboxMs?: number;
            sessionId?: string;
            sessionOptions?: components["schemas"]["spool.v1.SessionOptions"];
            /** @description The last snapshot of the workspace; absent before the first one. */
            snapshot?: string;
            /**
             * Format: date-time
             * @description When the snapshot was taken.
             */
            snapshotAt?: string;
            /** @description open or closed. */
            status?: string;
            /** @description Seq of the last event. */
            tip?: number;
            /** @description The beginning of the session's first message, up to 1000 characters. Empty before the first message. */
            title?: string;
            /**
             * Format: date-time
             * @description Time of the last event.
             */
            updatedAt?: string;
            /**
             * @description Tokens of the session's executions as the agents report them, without executions of its parent. A count above
             *     4294967295 is given as 4294967295.
             */
            usage?: components["schemas"]["spool.v1.Usage"];
            /**
             * Format: double
             * @description Total size of those files in bytes: a whole number.
             */
            workspaceBytes?: number;
            /** @description Number of files in the snapshot, including the agent's own records. */
            workspaceFiles?: number;
        };
        /** @description The first difference between two sessions. */
        "spool.v1.SessionComparison": {
            /** @description Whether the two sessions have equal events and the same number of them. */
            equal?: boolean;
            /** @description Number of events that are equal. */
            equalEvents?: number;
            /** @description The event of the requested session; absent if that session has no more events. */
            event?: components["schemas"]["spool.v1.Event"];
            /**
             * @description Path of the field in which the two events differ, such as data.block.content; empty if one session has no more
             *     events.
             */
            field?: string;
            /** @description Whether one session is a fork of the other; their shared history is not compared. */
            fork?: boolean;
            /** @description The result in one sentence. */
            summary?: string;
            /** @description The event of the other session. */
            withEvent?: components["schemas"]["spool.v1.Event"];
        };
        /** @description The changes between two events of a session. */
        "spool.v1.SessionDiff": {
            /** @description Number of all blocks that began or changed. */
            blockCount?: number;
            /** @description The first 200 blocks that began or changed, up to 2 MiB, in display order. */
            blocks?: components["schemas"]["spool.v1.BlockChange"][];
            files?: components["schemas"]["spool.v1.FilesDiff"];
            from?: number;
            /** @description Usage between the two events, as metered by the egress proxy. */
            metered?: components["schemas"]["spool.v1.UsageTotal"];
            /** @description Usage between the two events, as reported by the agents. */
            reported?: components["schemas"]["spool.v1.UsageTotal"];
            /** @description Changed statuses of the session, its executions, sub-agents, approval requests and sandbox. */
            statuses?: components["schemas"]["spool.v1.StatusChange"][];
            to?: number;
        };
        /** @description The failure of an execution. */
        "spool.v1.SessionError": {
            /** @description Error code; empty if the failure is not readable. */
            code?: string;
            executionId?: string;
            message?: string;
            /**
             * Format: date-time
             * @description When the execution ended.
             */
            time?: string;
        };
        /**
         * @description The options that a session may set. A value of 0 or "" means the agent's option, or the server's default if the
         *     agent has none.
         */
        "spool.v1.SessionOptions": {
            /** @description The budget of the whole session. When it is used up, further executions fail with BUDGET_EXCEEDED. */
            budget?: components["schemas"]["spool.v1.Budget"];
            /** @description The agent's program and its arguments. Required with architecture acp, refused with all others. */
            command?: string[];
            /**
             * @description Hosts that the sandbox may reach in addition to the model APIs: host, host:port or *.host, optionally after a
             *     list of methods (GET,HEAD api.example.com:443); without methods all are allowed. Up to 256 entries.
             */
            egress?: string[];
            /** @description Milliseconds between health checks of the sandbox: 1000 to 86400000. */
            healthIntervalMs?: number;
            /**
             * @description Absolute path of a folder on the server's machine in which the session works, instead of in a workspace of its
             *     own. The agent changes the files in that folder without isolation. Allowed only with local sandboxes, only where
             *     the setting host-paths permits the folder, and only when a session is created.
             */
            hostPath?: string;
            /**
             * @description The identity of the folder as the client sees it, computed by the CLI. The request is refused unless the server
             *     sees the same folder, on the same machine and as the same user. Empty disables this check. The value is not
             *     stored.
             */
            hostPathIdentity?: string;
            /** @description Milliseconds without a turn after which the sandbox is released. */
            idleTimeoutMs?: number;
            /** @description The sandbox's image, such as registry.example.com/agents:2; empty means the executor's default. */
            image?: string;
            /** @description The model's name, as the agent program expects it. */
            model?: string;
            /**
             * @description The API through which the model is reached: anthropic, openai or nvidia, if the architecture supports it; empty
             *     means the executor's default.
             */
            modelProvider?: string;
            /** @description For architecture acp: how the agent receives its model. */
            modelSettings?: components["schemas"]["spool.v1.ModelSettings"];
            /**
             * @description What happens to a turn whose agent cannot continue the session's conversation: fail (CONVERSATION_LOST) or
             *     continue without it; empty means the agent's conversation.onLoss.
             */
            onConversationLoss?: string;
            /** @description Age in milliseconds at which a sandbox is replaced, between two turns: 1000 to 86400000. */
            sandboxMaxAgeMs?: number;
            /** @description The longest lifetime of a session, in milliseconds. */
            sessionLimitMs?: number;
            /** @description Milliseconds between snapshots of the workspace while a turn runs: 1000 to 86400000. */
            syncIntervalMs?: number;
            /** @description The longest time that one execution may take, in milliseconds. */
            turnLimitMs?: number;
        };
        /** @description The state of a session after one of its events. */
        "spool.v1.SessionState": {
            /** @description The approval requests that were open, and the last others, 100 together, in order. */
            approvals?: components["schemas"]["spool.v1.Approval"][];
            /** @description Number of all blocks that had started. */
            blockCount?: number;
            /** @description One page of blocks, in display order. */
            blocks?: components["schemas"]["spool.v1.Block"][];
            /** @description Number of all sub-agent conversations that had started. */
            conversationCount?: number;
            /** @description The conversation main, and the first 200 conversations of sub-agents. */
            conversations?: components["schemas"]["spool.v1.Conversation"][];
            /** @description Number of all executions that had started. */
            executionCount?: number;
            /** @description The last 100 executions that had started, in order, without their field metered. */
            executions?: components["schemas"]["spool.v1.Execution"][];
            files?: components["schemas"]["spool.v1.WorkspaceState"];
            /**
             * @description Blocks of this page that were open and whose text is incomplete, because it is no longer stored or was never
             *     stored.
             */
            incompleteText?: components["schemas"]["spool.v1.IncompleteText"][];
            /** @description Usage of model requests so far, as metered by the egress proxy. */
            metered?: components["schemas"]["spool.v1.UsageTotal"];
            /** @description Page token for the next blocks; empty on the last page. */
            nextPageToken?: string;
            /** @description Position of the event. */
            position?: string;
            /** @description Usage of the executions so far, as reported by their agents. */
            reported?: components["schemas"]["spool.v1.UsageTotal"];
            /** @description The versions that the last resolved execution used; absent before the first one. */
            resolved?: components["schemas"]["spool.v1.ResolvedVersions"];
            /** @description Seq of the event. */
            seq?: number;
            /** @description The session as it was then; tip and position are those of the event. */
            session?: components["schemas"]["spool.v1.Session"];
            /**
             * Format: date-time
             * @description Time of the event.
             */
            time?: string;
            /** @description The plans or todo lists of the agent and of its sub-agents. */
            todos?: components["schemas"]["spool.v1.TodoList"][];
        };
        "spool.v1.SetBudgetResponse": {
            period?: string;
            position?: string;
            tenant?: string;
        };
        "spool.v1.SetLimitsResponse": {
            position?: string;
            tenant?: string;
        };
        "spool.v1.SignInSession": {
            /** @description The only agents that the caller may use; empty means all. */
            agents?: string[];
            /** @description The CSRF token of the session cookie. Empty without a session cookie. */
            csrfToken?: string;
            /**
             * Format: date-time
             * @description When the session ends at the latest. Absent for a caller with an API key.
             */
            expiresAt?: string;
            /** @description The API key of the caller, or the key from which its session comes. Empty for the local key. */
            keyId?: string;
            keyName?: string;
            role?: string;
            tenant?: string;
        };
        /** @description A version of a skill. */
        "spool.v1.Skill": {
            /** @description Size of the ZIP in bytes. */
            bytes?: number;
            /** Format: date-time */
            createdAt?: string;
            /** @description Description in the front matter of SKILL.md. */
            description?: string;
            /** @description The content of SKILL.md; absent in lists. */
            document?: string;
            files?: number;
            /** @description Name in the front matter of SKILL.md. */
            name?: string;
            ref?: components["schemas"]["spool.v1.Reference"];
            /** @description The tags of this version, which may include latest. */
            tags?: string[];
            /** @description Total size of its files in bytes. */
            unpackedBytes?: number;
        };
        "spool.v1.StartExecutionResponse": {
            /**
             * @description With wait: seq of an event, as the cursor with which a client follows the session. It is the event that ended the
             *     execution, or, if the execution has not ended, an event before its end; 0 is the beginning of the session.
             */
            cursor?: number;
            /** @description With wait: the execution when it ended, or as it is after that time; absent if the read models do not have it yet. */
            execution?: components["schemas"]["spool.v1.Execution"];
            executionId?: string;
            position?: string;
            sessionId?: string;
        };
        "spool.v1.StatusChange": {
            /** @description Empty if it did not exist at the first event. */
            from?: string;
            id?: string;
            /** @description session, execution, conversation, approval or sandbox. */
            kind?: string;
            to?: string;
        };
        /** @description One step of a plan that is being executed. */
        "spool.v1.Step": {
            /** @description Conversation of the sub-agent that executes the step, if there is one. */
            conversationId?: string;
            /** @description Ids of the steps that must be completed before. Absent when empty. */
            dependsOn?: string[];
            /**
             * Format: date-time
             * @description When the step was completed, failed or skipped.
             */
            endedAt?: string;
            /** @description failed. */
            errorCode?: string;
            /** @description failed; blocked and skipped: why. */
            errorMessage?: string;
            /** @description Execution of another session that executes the step, if there is one. */
            executionId?: string;
            /** @description Id of the plan's item, which depends_on of other steps refers to. */
            id?: string;
            result?: string;
            /**
             * Format: date-time
             * @description When the step began to run.
             */
            startedAt?: string;
            /** @description pending, blocked, ready, running, completed, failed or skipped. */
            status?: string;
            title?: string;
        };
        "spool.v1.SyncSessionResponse": {
            position?: string;
        };
        "spool.v1.TenantBudget": {
            budget?: components["schemas"]["spool.v1.Budget"];
            /** @description Which limit is used up, in a sentence; empty if none is. */
            exceeded?: string;
            /** @description The first day of the period in UTC, such as 2026-01-31; empty for total. */
            from?: string;
            /** @description day, month or total. */
            period?: string;
            /** @description Usage since the period began. */
            spent?: components["schemas"]["spool.v1.Budget"];
            tenant?: string;
            /**
             * Format: date-time
             * @description When the next period begins; absent for total.
             */
            until?: string;
        };
        /**
         * @description Limits of a tenant, or its use of them. A field that is absent or 0 means the setting of the service that enforces
         *     the limit.
         */
        "spool.v1.TenantLimits": {
            /**
             * Format: double
             * @description Bytes of those events: their text and data, plus 256 bytes for each event.
             */
            eventBytesPerDay?: number;
            /**
             * Format: double
             * @description Events that the tenant's sessions may add to the log in one UTC day.
             */
            eventsPerDay?: number;
            /** @description API keys that are not revoked. */
            keys?: number;
            /** @description Size of a burst of requests, at one gateway. */
            requestBurst?: number;
            /**
             * Format: double
             * @description Requests per second, at one gateway.
             */
            requestsPerSecond?: number;
            /** @description Sandboxes that exist at the same time on one engine. In used, this counts all engines. */
            sandboxes?: number;
            /** @description Sessions that are not deleted. */
            sessions?: number;
            /** @description Turns that run at the same time, over all executors. */
            slots?: number;
            /**
             * Format: double
             * @description Bytes of sessions, their files and snapshots, and skills.
             */
            storageBytes?: number;
            /** @description SSE, WebSocket and gRPC streams that are open at one gateway, and requests with wait. */
            streams?: number;
        };
        "spool.v1.TerminateEnvironmentResponse": {
            position?: string;
        };
        "spool.v1.TerminateExecutionResponse": {
            position?: string;
        };
        /** @description A summary of a session over time. */
        "spool.v1.Timeline": {
            /**
             * Format: double
             * @description Length of a bucket in milliseconds. Bucket N begins N times this length after start.
             */
            bucketMs?: number;
            /** Format: date-time */
            end?: string;
            /** @description The lanes with events: session, sandbox, model, the conversation main, and the conversations of sub-agents. */
            lanes?: components["schemas"]["spool.v1.TimelineLane"][];
            /** @description The last 500 marks, in order of seq. */
            marks?: components["schemas"]["spool.v1.TimelineMark"][];
            /** @description Number of conversations without a lane: at most 100 conversations, those with the most events, have one. */
            moreLanes?: number;
            /** @description Number of earlier marks, which are omitted. */
            moreMarks?: number;
            /**
             * Format: date-time
             * @description Times of the earliest and of the latest event.
             */
            start?: string;
            /** @description Seq of the last event that is counted. */
            tip?: number;
        };
        "spool.v1.TimelineLane": {
            /** @description Of a conversation. */
            conversationId?: string;
            /** @description Number of events in each bucket. */
            events?: number[];
            /** @description conversation, sandbox, model (requests to models) or session (all other events). */
            kind?: string;
            /** @description Name of the sub-agent of a conversation. */
            name?: string;
            /** @description Number of events of the lane. */
            total?: number;
        };
        "spool.v1.TimelineMark": {
            /** @description approval. */
            approvalId?: string;
            /** @description error, execution_ended: code and beginning of the message. approval: the title of the request. */
            code?: string;
            conversationId?: string;
            /** Format: date-time */
            endedAt?: string;
            /** @description approval: seq and time of the end of the request; absent while it is open. */
            endedSeq?: number;
            executionId?: string;
            /** @description error, approval, execution_started or execution_ended. */
            kind?: string;
            message?: string;
            seq?: number;
            /** @description approval: the present status of the request, as in Approval. */
            status?: string;
            /** Format: date-time */
            time?: string;
            /** @description Type of the event. */
            type?: string;
        };
        /** @description An entry of a todo list, or an item of a plan in the form of one. */
        "spool.v1.TodoItem": {
            content?: string;
            /** @description pending, in_progress, completed or cancelled. */
            status?: string;
        };
        "spool.v1.TodoList": {
            conversationId?: string;
            items?: components["schemas"]["spool.v1.TodoItem"][];
        };
        /** @description A field of a block that is not whole. */
        "spool.v1.TruncatedField": {
            blockId?: string;
            /** @description Length of the whole field in bytes. */
            bytes?: number;
            /**
             * @description content, summary, output, description or message, of which the beginning is included; or input, parts, todos, plan, step or
             *     skill, which are omitted.
             */
            field?: string;
        };
        "spool.v1.UpdateSessionResponse": {
            position?: string;
            sessionId?: string;
        };
        /** @description Token usage. */
        "spool.v1.Usage": {
            cacheReadTokens?: number;
            cacheWriteTokens?: number;
            inputTokens?: number;
            outputTokens?: number;
        };
        /** @description Sums over a session: whole numbers, except for the cost. */
        "spool.v1.UsageTotal": {
            /** Format: double */
            cacheReadTokens?: number;
            /** Format: double */
            cacheWriteTokens?: number;
            /** Format: double */
            costUsd?: number;
            /**
             * Format: double
             * @description Requests without a response, or with a response status of 400 or above.
             */
            failed?: number;
            /** Format: double */
            inputTokens?: number;
            /** Format: double */
            outputTokens?: number;
            /**
             * Format: double
             * @description Number of metered requests; 0 where requests are not counted.
             */
            requests?: number;
        };
        /** @description The present reason of an execution's wait. It is no part of the log. */
        "spool.v1.Waiting": {
            /** @description With approval: the oldest approval request that nobody has decided. */
            approvalId?: string;
            /** @description One sentence about this wait. */
            detail?: string;
            /** @description With earlier_execution: the execution of the session that must end first. */
            executionId?: string;
            /** @description With tenant_limit: the limit that is reached. With slot: the number of slots of the executor that reports the wait. */
            limit?: number;
            /** @description One of: approval, budget, disk, earlier_execution, engine_gone, not_before, paused, slot, tenant_limit. */
            reason?: string;
            /** @description What to do about the reason. */
            remedy?: string;
            /**
             * Format: date-time
             * @description Time since when the execution has waited for this reason; absent if it is not known.
             */
            since?: string;
            /**
             * Format: date-time
             * @description With not_before: time of the next attempt.
             */
            until?: string;
            /** @description With tenant_limit: how much of the limit the tenant uses. */
            used?: number;
        };
        /**
         * @description A file that must be in the workspace before the agent starts. A request with files may have at most 16 MiB
         *     (--max-request); larger files are uploaded with PUT /api/sessions/{id}/files/{path}.
         */
        "spool.v1.WorkspaceFile": {
            /** @description The content, if it is text. */
            content?: string;
            /** @description The content in base64, instead of content. */
            contentBase64?: string;
            /** @description Permission bits as a number: 420 is 0644, 493 is 0755. 0 means 0644. */
            mode?: number;
            /** @description Path relative to the workspace, with slashes: up to 4096 bytes, no "..", no backslash. */
            path?: string;
        };
        /** @description A workspace after an event: the last snapshot before the event, and the changes since that snapshot. */
        "spool.v1.WorkspaceState": {
            /**
             * @description Whether the snapshot's files can still be read with /api/sessions/{sessionId}/files?at=. false after the
             *     retention has removed the snapshot.
             */
            available?: boolean;
            /** @description Number of all file events after the snapshot. */
            changeCount?: number;
            /**
             * @description The first 200 file events after the snapshot: file_created, file_modified, file_deleted, file_put and
             *     file_removed.
             */
            changes?: components["schemas"]["spool.v1.FileChange"][];
            /** @description If this snapshot was removed, seq of the oldest snapshot that still exists; 0 for none. */
            oldestSeq?: number;
            /** @description Absent if no snapshot had been taken. */
            snapshot?: string;
            /** Format: date-time */
            snapshotAt?: string;
            /**
             * Format: double
             * @description Total size of those files in bytes: a whole number.
             */
            snapshotBytes?: number;
            /** @description Number of files in the snapshot, including the agent's own records. */
            snapshotFiles?: number;
            /** @description Seq of the snapshot's workspace_synced event. */
            snapshotSeq?: number;
            /**
             * @description The ancestor session that the snapshot belongs to. Set only for a fork without a snapshot of its own, which has
             *     the files it began with.
             */
            snapshotSession?: string;
            /** @description The known state of the files, in one sentence. */
            summary?: string;
        };
    };
    responses: {
        /** @description The error; docs/errors.md lists the codes. */
        Problem: {
            headers: {
                [name: string]: unknown;
            };
            content: {
                "application/problem+json": components["schemas"]["Problem"];
            };
        };
    };
    parameters: {
        /** @description Seq of an event: reads the last snapshot before that event instead of the last one. Cannot be combined with live. */
        At: number;
        /** @description Path relative to the workspace, with slashes, up to 4096 bytes; without .., backslash and NUL. */
        FilePath: string;
        /** @description A folder relative to the workspace; absent means the workspace itself. */
        FolderPath: string;
        /** @description 1 to 255 printable ASCII characters. For 24 hours, repeating a request with the same key and body has no further effect, and a request with the same key and another body is refused. */
        IdempotencyKey: string;
        /** @description 1 reads from the session's running sandbox instead of the last snapshot; NO_LIVE_SANDBOX if no sandbox runs. */
        Live: "0" | "1";
        /** @description Waits up to five seconds until the read models contain this position of the session or entry. */
        MinPosition: string;
        /** @description An organization within the tenant, or the account. */
        Org: string;
        /** @description organization (or empty), identity_account or platform. */
        Scope: string;
        SessionId: string;
        /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
        SpoolUser: string;
    };
    requestBodies: never;
    headers: never;
    pathItems: never;
}
export type $defs = Record<string, never>;
export interface operations {
    Agents_ListAgents: {
        parameters: {
            query?: {
                /** @description 1 to 200; 0 means 50. A page also ends at 2 MiB of definitions. */
                pageSize?: number;
                pageToken?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListAgentsResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Agents_ApplyAgent: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /** @description A reference without a version. */
                    ref?: components["schemas"]["spool.v1.Reference"];
                    /** @description An AgentSpec as in docs/events.md, up to 4 MiB. */
                    spec?: components["schemas"]["spool.v1.Json"];
                    /** @description Tags for the version, in addition to latest. */
                    tags?: string[];
                };
            };
        };
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ApplyResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Agents_GetAgent: {
        parameters: {
            query?: {
                /** @description organization (or empty), identity_account or platform. */
                scope?: string;
                org?: string;
                /** @description Empty or latest, a tag, or a digest. */
                version?: string;
                /** @description Waits up to five seconds until the read models contain this position of the entry. */
                minPosition?: string;
            };
            header?: never;
            path: {
                slug: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A version of an agent, an instance or an environment. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.Definition"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Agents_RemoveAgent: {
        parameters: {
            query?: {
                scope?: string;
                org?: string;
            };
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                slug: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.RemoveResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Approvals_ListApprovals: {
        parameters: {
            query?: {
                /** @description Lists the requests of one session. */
                sessionId?: string;
                /** @description Lists the requests of one execution. */
                executionId?: string;
                /** @description A status of Approval, or open, which is pending or decided; empty means all. */
                status?: string;
                /** @description 1 to 200; 0 means 50. */
                pageSize?: number;
                pageToken?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListApprovalsResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Approvals_GetApproval: {
        parameters: {
            query?: {
                minPosition?: string;
            };
            header?: never;
            path: {
                approval_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description An approval request. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.Approval"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Approvals_DecideApproval: {
        parameters: {
            query?: never;
            header?: {
                /** @description 1 to 255 printable ASCII characters. For 24 hours, repeating a request with the same key and body has no further effect, and a request with the same key and another body is refused. */
                "Idempotency-Key"?: components["parameters"]["IdempotencyKey"];
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                approval_id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /**
                     * @description With answer, for questions: an object with a list of texts for the id of each question, up to 64 KiB. Answers to
                     *     secret questions are encrypted on arrival and never returned.
                     */
                    answers?: components["schemas"]["spool.v1.Json"];
                    /** @description With approve: an object that replaces the arguments of the call, up to 128 KiB. Only if the request is editable. */
                    arguments?: components["schemas"]["spool.v1.Json"];
                    /** @description With reject: what the agent is told, up to 16 KiB. */
                    comment?: string;
                    /** @description With answer, for an elicitation: an object that matches the schema of the request, up to 64 KiB. */
                    content?: components["schemas"]["spool.v1.Json"];
                    /** @description approve, approve_all (this request, and all later ones of its class in the execution), skip, reject or answer. */
                    decision?: string;
                };
            };
        };
        responses: {
            /** @description A successful response. */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.DecideApprovalResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Audit_ListAudit: {
        parameters: {
            query?: {
                /** @description Only entries of this session, which may be deleted. */
                session?: string;
                /** @description Only entries by this actor: id or name of an API key, an end user that Spool-User named, or the id of an actor. */
                actor?: string;
                /** @description Only entries at or after this RFC 3339 time. */
                since?: string;
                /** @description 1 to 100; 0 means 50. */
                pageSize?: number;
                /** @description The next_page_token of the previous page, with the same session, actor and since. */
                pageToken?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListAuditResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Budgets_ListBudgets: {
        parameters: {
            query?: {
                /**
                 * @description The tenant; empty means the caller's tenant. Only the root key, or any caller on a server without keys, may name
                 *     another tenant.
                 */
                tenant?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListBudgetsResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Budgets_SetBudget: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                /** @description day or month (calendar, in UTC), or total. */
                period: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /** @description The budget, with at least one limit. */
                    budget?: components["schemas"]["spool.v1.Budget"];
                    /** @description The tenant of the budget; empty means the caller's tenant. */
                    tenant?: string;
                };
            };
        };
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.SetBudgetResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Budgets_RemoveBudget: {
        parameters: {
            query?: {
                /** @description The tenant of the budget; empty means the caller's tenant. */
                tenant?: string;
            };
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                /** @description day, month or total. */
                period: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.RemoveBudgetResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    DeadLetters_ListDeadLetters: {
        parameters: {
            query?: {
                /** @description 1 to 100; 0 means 50. A page may contain fewer. */
                pageSize?: number;
                /** @description The next_page_token of the previous page. */
                pageToken?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListDeadLettersResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    DeadLetters_GetDeadLetter: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.DeadLetter"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    DeadLetters_DropDeadLetter: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.DropDeadLetterResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    DeadLetters_RetryDeadLetter: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.RetryDeadLetterResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Environments_ListEnvironments: {
        parameters: {
            query?: {
                /** @description 1 to 200; 0 means 50. A page also ends at 2 MiB of definitions. */
                pageSize?: number;
                pageToken?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListEnvironmentsResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Environments_ApplyEnvironment: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /** @description A reference without a version. */
                    ref?: components["schemas"]["spool.v1.Reference"];
                    /** @description An EnvironmentSpec as in docs/events.md, up to 4 MiB. A secret without a value keeps its present value. */
                    spec?: components["schemas"]["spool.v1.Json"];
                    /** @description Tags for the version, in addition to latest. */
                    tags?: string[];
                };
            };
        };
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ApplyResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Environments_ExplainEnvironment: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /** @description A reference; empty means the instance's agent, or the built-in agent. */
                    agent?: string | components["schemas"]["ReferenceObject"];
                    /** @description References to environments, up to 32. */
                    environments?: (string | components["schemas"]["ReferenceObject"])[];
                    /** @description A reference to an instance, instead of agent. */
                    instance?: string | components["schemas"]["ReferenceObject"];
                };
            };
        };
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ExplainEnvironmentResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Environments_GetEnvironment: {
        parameters: {
            query?: {
                /** @description organization (or empty), identity_account or platform. */
                scope?: string;
                org?: string;
                /** @description Empty or latest, a tag, or a digest. */
                version?: string;
                /** @description Waits up to five seconds until the read models contain this position of the entry. */
                minPosition?: string;
            };
            header?: never;
            path: {
                slug: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A version of an agent, an instance or an environment. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.Definition"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Environments_RemoveEnvironment: {
        parameters: {
            query?: {
                scope?: string;
                org?: string;
            };
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                slug: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.RemoveResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Executions_ListExecutions: {
        parameters: {
            query?: {
                /** @description 1 to 200; 0 means 50. */
                pageSize?: number;
                pageToken?: string;
                /** @description queued, starting, running, waiting_for_approval, paused, completed, failed or cancelled; empty means all. */
                phase?: string;
                /**
                 * @description A reference: lists executions of any version of the agent, or, with a digest, of that version only. "default" is
                 *     the built-in agent.
                 */
                agent?: string;
                /** @description claude-code (alias claude-sdk), codex, opencode, acp or spool; empty means all. */
                architecture?: string;
                /** @description The name of a field of the message's metadata; the metadata must be an object. */
                metadataKey?: string;
                /** @description The value of that field: a string without quotes, any other value as compact JSON. */
                metadataValue?: string;
                /** @description RFC 3339 time: executions created at or after it. */
                createdAfter?: string;
                /** @description RFC 3339 time: executions created before it. */
                createdBefore?: string;
                /** @description RFC 3339 time: executions updated at or after it. */
                updatedAfter?: string;
                /** @description RFC 3339 time: executions updated before it. */
                updatedBefore?: string;
                /** @description Text to find in the query, in the result or in the metadata's JSON, ignoring case: up to 256 characters. */
                text?: string;
                /** @description created or updated; empty means created. */
                sort?: string;
                /** @description desc or asc; empty means desc, the newest first. */
                order?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListExecutionsResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Executions_StartExecution: {
        parameters: {
            query?: {
                /**
                 * @description How long to wait for the end of the execution before answering: a duration such as 30s, up to 10m, counted from the
                 *     moment at which the message is stored. Empty answers at once. Over REST it is a query parameter.
                 */
                wait?: string;
            };
            header?: {
                /** @description 1 to 255 printable ASCII characters. For 24 hours, repeating a request with the same key and body has no further effect, and a request with the same key and another body is refused. */
                "Idempotency-Key"?: components["parameters"]["IdempotencyKey"];
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /** @description A reference; empty means the built-in agent, default. */
                    agent?: string | components["schemas"]["ReferenceObject"];
                    /** @description An alias of agent. If both are set they must be equal. */
                    agentProfileRef?: string | components["schemas"]["ReferenceObject"];
                    architecture?: string;
                    /** @description Up to 1 MiB. */
                    content?: string;
                    /** @description Variables of this execution only, by name, up to 256. They override all other layers. */
                    environment?: {
                        [key: string]: components["schemas"]["spool.v1.RunVariable"];
                    };
                    /**
                     * @description References to environments, up to 32. They are layered above the instance's environments; a later one overrides
                     *     an earlier one.
                     */
                    environments?: (string | components["schemas"]["ReferenceObject"])[];
                    /** @description A reference to an agent instance, instead of agent. */
                    instance?: string | components["schemas"]["ReferenceObject"];
                    /** @description Metadata of the message; the new session gets the same metadata. */
                    metadata?: components["schemas"]["spool.v1.Json"];
                    model?: string;
                    parts?: components["schemas"]["spool.v1.Part"][];
                    /** @description Adapts the agent's permission policy to this execution. */
                    permissions?: components["schemas"]["spool.v1.ExecutionPermissions"];
                    sandbox?: string;
                    sessionOptions?: components["schemas"]["spool.v1.SessionOptions"];
                    /** @description The transcript that the agent continues, as in CreateSessionRequest. */
                    transcript?: string;
                    /** @description Files to put into the workspace. */
                    workspaceFiles?: components["schemas"]["spool.v1.WorkspaceFile"][];
                };
            };
        };
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.StartExecutionResponse"];
                };
            };
            /** @description A successful response. */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.StartExecutionResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Executions_GetExecution: {
        parameters: {
            query?: {
                minPosition?: string;
            };
            header?: never;
            path: {
                execution_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.Execution"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Executions_CancelExecution: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                execution_id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": Record<string, never>;
            };
        };
        responses: {
            /** @description A successful response. */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.CancelExecutionResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Executions_PauseExecution: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                execution_id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": Record<string, never>;
            };
        };
        responses: {
            /** @description A successful response. */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.PauseExecutionResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Executions_RecoverExecution: {
        parameters: {
            query?: never;
            header?: {
                /** @description 1 to 255 printable ASCII characters. For 24 hours, repeating a request with the same key and body has no further effect, and a request with the same key and another body is refused. */
                "Idempotency-Key"?: components["parameters"]["IdempotencyKey"];
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                /** @description The failed execution. */
                execution_id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /**
                     * @description Variables of the new execution, by name, up to 256. They override those of the failed execution's message, which
                     *     also apply. Secrets of that message were deleted when the execution ended and must be sent again.
                     */
                    environment?: {
                        [key: string]: components["schemas"]["spool.v1.RunVariable"];
                    };
                };
            };
        };
        responses: {
            /** @description A successful response. */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.RecoverExecutionResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Executions_ResumeExecution: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                execution_id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": Record<string, never>;
            };
        };
        responses: {
            /** @description A successful response. */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ResumeExecutionResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Executions_TerminateExecution: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                execution_id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": Record<string, never>;
            };
        };
        responses: {
            /** @description A successful response. */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.TerminateExecutionResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Instances_ListInstances: {
        parameters: {
            query?: {
                /** @description 1 to 200; 0 means 50. A page also ends at 2 MiB of definitions. */
                pageSize?: number;
                pageToken?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListInstancesResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Instances_ApplyInstance: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /** @description A reference without a version. */
                    ref?: components["schemas"]["spool.v1.Reference"];
                    /** @description An InstanceSpec as in docs/events.md, up to 4 MiB. */
                    spec?: components["schemas"]["spool.v1.Json"];
                    /** @description Tags for the version, in addition to latest. */
                    tags?: string[];
                };
            };
        };
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ApplyResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Instances_GetInstance: {
        parameters: {
            query?: {
                /** @description organization (or empty), identity_account or platform. */
                scope?: string;
                org?: string;
                /** @description Empty or latest, a tag, or a digest. */
                version?: string;
                /** @description Waits up to five seconds until the read models contain this position of the entry. */
                minPosition?: string;
            };
            header?: never;
            path: {
                slug: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A version of an agent, an instance or an environment. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.Definition"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Instances_RemoveInstance: {
        parameters: {
            query?: {
                scope?: string;
                org?: string;
            };
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                slug: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.RemoveResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Keys_ListKeys: {
        parameters: {
            query?: {
                /** @description The tenant of the keys; empty means the caller's tenant, as in CreateKeyRequest. */
                tenant?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListKeysResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Keys_CreateKey: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /**
                     * @description Slugs of the only agents that the key may use, at most 64; default is the built-in agent. Empty means the
                     *     agents of the caller's key.
                     */
                    agents?: string[];
                    /**
                     * @description When the key expires: a duration from now, such as 720h, or an RFC 3339 time. Empty means the expiry of the
                     *     caller's key. Expiry is checked against the clock of the server's database.
                     */
                    expires?: string;
                    /** @description A name to recognise the key by: 1 to 100 characters. */
                    name?: string;
                    /**
                     * @description The key's role: use, operate, or admin; each includes the rights of the roles before it. Empty means the role of
                     *     the caller's key. A key cannot create a key with more rights than its own.
                     */
                    role?: string;
                    /**
                     * @description The tenant of the key; empty means the caller's tenant. Only the root key, or any caller on a server without
                     *     keys, may name another tenant.
                     */
                    tenant?: string;
                };
            };
        };
        responses: {
            /** @description A successful response. */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.CreateKeyResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Keys_RevokeKey: {
        parameters: {
            query?: {
                /** @description The tenant of the key; empty means the caller's tenant, as in CreateKeyRequest. */
                tenant?: string;
            };
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                key_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.RevokeKeyResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Limits_GetLimits: {
        parameters: {
            query?: {
                /**
                 * @description The tenant; empty means the caller's tenant. Only the root key, or any caller on a server without keys, may name
                 *     another tenant.
                 */
                tenant?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.GetLimitsResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Limits_SetLimits: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /** @description At least one field. Existing limits that are absent here are removed. */
                    limits?: components["schemas"]["spool.v1.TenantLimits"];
                    /** @description The tenant of the limits; empty means the caller's tenant. */
                    tenant?: string;
                };
            };
        };
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.SetLimitsResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Limits_RemoveLimits: {
        parameters: {
            query?: {
                /** @description The tenant of the limits; empty means the caller's tenant. */
                tenant?: string;
            };
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.RemoveLimitsResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Operation_OpenAPI: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description OpenAPI 3.1. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": Record<string, never>;
                };
            };
        };
    };
    Sessions_ListSessions: {
        parameters: {
            query?: {
                /** @description 1 to 200; 0 means 50. */
                pageSize?: number;
                /** @description The nextPageToken of the previous page. */
                pageToken?: string;
                /** @description open or closed; empty means both. */
                status?: string;
                /**
                 * @description A reference: lists sessions of any version of the agent, or, with a digest, of that version only. "default" is
                 *     the built-in agent.
                 */
                agent?: string;
                /** @description claude-code (alias claude-sdk), codex, opencode, acp or spool; empty means all. */
                architecture?: string;
                /** @description The name of a metadata field; the metadata must be an object. */
                metadataKey?: string;
                /** @description The value of that field: a string without quotes, any other value as compact JSON. */
                metadataValue?: string;
                /** @description RFC 3339 time: sessions created at or after it. */
                createdAfter?: string;
                /** @description RFC 3339 time: sessions created before it. */
                createdBefore?: string;
                /** @description RFC 3339 time: sessions whose last event is at or after it. */
                updatedAfter?: string;
                /** @description RFC 3339 time: sessions whose last event is before it. */
                updatedBefore?: string;
                /** @description Text to find in the title or in the metadata's JSON, ignoring case: up to 256 characters. */
                text?: string;
                /** @description created or updated; empty means created. */
                sort?: string;
                /** @description desc or asc; empty means desc, the newest first. */
                order?: string;
                /** @description A session id: lists the sessions that were forked from it. */
                parent?: string;
                /** @description queued, running, waiting_for_approval, failed or idle: lists sessions in one of these phases; empty means all. */
                phase?: string[];
                /** @description true lists sessions with open approval requests, false those without; absent means both. */
                hasOpenApprovals?: boolean;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListSessionsResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Sessions_CreateSession: {
        parameters: {
            query?: never;
            header?: {
                /** @description 1 to 255 printable ASCII characters. For 24 hours, repeating a request with the same key and body has no further effect, and a request with the same key and another body is refused. */
                "Idempotency-Key"?: components["parameters"]["IdempotencyKey"];
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /**
                     * @description A reference, [platform/|identity_account/][org/]slug[@version]; empty means the built-in agent, default. Over
                     *     REST a reference may also be an object {scope, org, slug, version}, here and in all other fields that hold
                     *     references.
                     */
                    agent?: string | components["schemas"]["ReferenceObject"];
                    /** @description An alias of agent. If both are set they must be equal. */
                    agentProfileRef?: string | components["schemas"]["ReferenceObject"];
                    /** @description claude-code (alias claude-sdk), codex, opencode, acp or spool; empty means the agent's architecture. */
                    architecture?: string;
                    /**
                     * @description References to environments, up to 32. They are layered above the instance's environments; a later one overrides
                     *     an earlier one.
                     */
                    environments?: (string | components["schemas"]["ReferenceObject"])[];
                    /** @description A reference to an agent instance, instead of agent. */
                    instance?: string | components["schemas"]["ReferenceObject"];
                    /** @description Application data, up to 16 KiB, returned unchanged. */
                    metadata?: components["schemas"]["spool.v1.Json"];
                    /** @description The model; equivalent to sessionOptions.model. */
                    model?: string;
                    /** @description The sandbox provider; empty means the server's default. */
                    sandbox?: string;
                    /** @description The session's options. */
                    sessionOptions?: components["schemas"]["spool.v1.SessionOptions"];
                    /**
                     * @description The reference that POST /api/transcripts returned: the agent continues the conversation of that transcript. The
                     *     reference is valid for one session and for 10 minutes. If agent and architecture are empty, the session uses the
                     *     transcript's.
                     */
                    transcript?: string;
                    /** @description Files to put into the workspace. */
                    workspaceFiles?: components["schemas"]["spool.v1.WorkspaceFile"][];
                };
            };
        };
        responses: {
            /** @description A successful response. */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.CreateSessionResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Events_Stream: {
        parameters: {
            query?: {
                /** @description The cursor: seq of the last event that the client has received. */
                after?: number;
                /** @description false (or 0) omits metadata from the events. */
                metadata?: boolean;
                /** @description true (or 1) replays past events instead of streaming new ones; the stream ends after the last event. The parameters below apply only to a replay. */
                replay?: boolean;
                /** @description The replay's speed as a multiple of the original: a positive number, or max. */
                speed?: string;
                /** @description Seq of the first event. */
                from?: number;
                /** @description Seq of the last event; absent means the session's last event when the replay begins. */
                to?: number;
                /** @description Replays only the events of this execution, up to its end. */
                executionId?: string;
            };
            header?: {
                /** @description The cursor of a client that reconnects; it overrides after. */
                "Last-Event-ID"?: string;
            };
            path: {
                sessionId: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description The stream. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/event-stream": string;
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Files_List: {
        parameters: {
            query?: {
                /** @description A folder relative to the workspace; absent means the workspace itself. */
                dir?: components["parameters"]["FolderPath"];
                /** @description Waits up to five seconds until the read models contain this position of the session or entry. */
                minPosition?: components["parameters"]["MinPosition"];
                /** @description 1 reads from the session's running sandbox instead of the last snapshot; NO_LIVE_SANDBOX if no sandbox runs. */
                live?: components["parameters"]["Live"];
                /** @description Seq of an event: reads the last snapshot before that event instead of the last one. Cannot be combined with live. */
                at?: components["parameters"]["At"];
            };
            header?: never;
            path: {
                sessionId: components["parameters"]["SessionId"];
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description The files. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["FileListing"];
                    "application/x-tar": string;
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Files_PutArchive: {
        parameters: {
            query?: {
                /** @description A folder relative to the workspace; absent means the workspace itself. */
                dir?: components["parameters"]["FolderPath"];
            };
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                sessionId: components["parameters"]["SessionId"];
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/x-tar": string;
            };
        };
        responses: {
            /** @description The request is stored and takes effect later. */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["FileAccepted"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Files_Get: {
        parameters: {
            query?: {
                /** @description Waits up to five seconds until the read models contain this position of the session or entry. */
                minPosition?: components["parameters"]["MinPosition"];
                /** @description 1 reads from the session's running sandbox instead of the last snapshot; NO_LIVE_SANDBOX if no sandbox runs. */
                live?: components["parameters"]["Live"];
                /** @description Seq of an event: reads the last snapshot before that event instead of the last one. Cannot be combined with live. */
                at?: components["parameters"]["At"];
            };
            header?: never;
            path: {
                sessionId: components["parameters"]["SessionId"];
                /** @description Path relative to the workspace, with slashes, up to 4096 bytes; without .., backslash and NUL. */
                path: components["parameters"]["FilePath"];
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description The content. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "*/*": string;
                };
            };
            /** @description The requested range. */
            206: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "*/*": string;
                };
            };
            /** @description The client's copy is current. */
            304: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
            default: components["responses"]["Problem"];
        };
    };
    Files_Put: {
        parameters: {
            query?: {
                /** @description Permission bits in octal, such as 755; the default is 644. */
                mode?: string;
            };
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                sessionId: components["parameters"]["SessionId"];
                /** @description Path relative to the workspace, with slashes, up to 4096 bytes; without .., backslash and NUL. */
                path: components["parameters"]["FilePath"];
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/octet-stream": string;
            };
        };
        responses: {
            /** @description The request is stored and takes effect later. */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["FileAccepted"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Files_Delete: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                sessionId: components["parameters"]["SessionId"];
                /** @description Path relative to the workspace, with slashes, up to 4096 bytes; without .., backslash and NUL. */
                path: components["parameters"]["FilePath"];
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description The request is stored and takes effect later. */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["FileChange"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Sessions_GetSession: {
        parameters: {
            query?: {
                /** @description Waits up to five seconds until the read models contain this position of the session. */
                minPosition?: string;
            };
            header?: never;
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.Session"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Sessions_DeleteSession: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.DeleteSessionResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Sessions_UpdateSession: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /** @description Names of sessionOptions fields to reset to the server's default, such as egress. */
                    clear?: string[];
                    metadata?: components["schemas"]["spool.v1.Json"];
                    /** @description Fields that are 0, "" or an empty list keep their values. */
                    sessionOptions?: components["schemas"]["spool.v1.SessionOptions"];
                };
            };
        };
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.UpdateSessionResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Events_ListBlocks: {
        parameters: {
            query?: {
                /** @description Only blocks of this conversation; empty means all. */
                conversationId?: string;
                minPosition?: string;
                /** @description Empty returns all blocks in display order. newest returns a page of the last blocks, in reverse display order. */
                order?: string;
                /**
                 * @description With order newest: the field next of the previous page. The page contains the blocks before that page, without
                 *     blocks that began after the first page was read.
                 */
                before?: string;
                /** @description With order newest: 1 to 200 blocks; 0 means 50. A page also ends at about 512 KiB. */
                limit?: number;
            };
            header?: never;
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListBlocksResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Events_GetBlock: {
        parameters: {
            query?: {
                minPosition?: string;
            };
            header?: never;
            path: {
                session_id: string;
                block_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.GetBlockResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Sessions_CompareSessions: {
        parameters: {
            query?: {
                /** @description The other session. */
                with?: string;
                minPosition?: string;
            };
            header?: never;
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description The first difference between two sessions. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.SessionComparison"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Sessions_ListConversations: {
        parameters: {
            query?: {
                minPosition?: string;
            };
            header?: never;
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListConversationsResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Sessions_DiffSession: {
        parameters: {
            query?: {
                /** @description Seq of the first event. */
                from?: number;
                /** @description Seq of the second event, which must not be before the first. */
                to?: number;
                minPosition?: string;
            };
            header?: never;
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description The changes between two events of a session. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.SessionDiff"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Sessions_TerminateEnvironment: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": Record<string, never>;
            };
        };
        responses: {
            /** @description A successful response. */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.TerminateEnvironmentResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Events_ListEvents: {
        parameters: {
            query?: {
                /** @description The cursor: returns events with a greater seq. 0 is the beginning. */
                after?: number;
                /** @description 1 to 1000; 0 means 100. A page also ends at 2 MiB. */
                limit?: number;
                /** @description Event types to return, repeated or separated by commas; empty means all. */
                types?: string[];
                minPosition?: string;
                /** @description false omits metadata from the events; absent means true. */
                metadata?: boolean;
            };
            header?: never;
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListEventsResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Executions_ListSessionExecutions: {
        parameters: {
            query?: {
                pageSize?: number;
                pageToken?: string;
                minPosition?: string;
            };
            header?: never;
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListExecutionsResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Sessions_ForkSession: {
        parameters: {
            query?: never;
            header?: {
                /** @description 1 to 255 printable ASCII characters. For 24 hours, repeating a request with the same key and body has no further effect, and a request with the same key and another body is refused. */
                "Idempotency-Key"?: components["parameters"]["IdempotencyKey"];
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                /** @description The session to fork. */
                session_id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /**
                     * @description A reference to another version of the session's agent, or to another agent of the same architecture. Empty means
                     *     the session's agent.
                     */
                    agent?: string | components["schemas"]["ReferenceObject"];
                    /**
                     * @description Forks although the agent's conversation is lost: the fork begins a new one. Otherwise such a fork is refused with
                     *     CONVERSATION_LOST.
                     */
                    allowConversationLoss?: boolean;
                    /** @description Seq of the last event that the fork inherits; absent means the session's last event. */
                    at?: number;
                    /** @description Replaces the session's metadata; absent keeps it. */
                    metadata?: components["schemas"]["spool.v1.Json"];
                    /** @description Makes no session, and only answers where the fork would begin. */
                    preview?: boolean;
                };
            };
        };
        responses: {
            /** @description A successful response. */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ForkSessionResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Events_ListHistory: {
        parameters: {
            query?: {
                /** @description The cursor: the number of inherited events to skip. 0 is the beginning. */
                after?: number;
                /** @description 1 to 1000; 0 means 100. A page also ends at 2 MiB. */
                limit?: number;
                minPosition?: string;
            };
            header?: never;
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListHistoryResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Events_ListHistoryBlocks: {
        parameters: {
            query?: {
                minPosition?: string;
                /** @description 1 to 200 blocks; 0 means 50. */
                pageSize?: number;
                /** @description The nextPageToken of the previous page. */
                pageToken?: string;
            };
            header?: never;
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListHistoryBlocksResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Sessions_InterruptSession: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": Record<string, never>;
            };
        };
        responses: {
            /** @description A successful response. */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.InterruptSessionResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Sessions_PostMessage: {
        parameters: {
            query?: {
                /**
                 * @description How long to wait for the end of the execution before answering: a duration such as 30s, up to 10m, counted from the
                 *     moment at which the message is stored. Empty answers at once. Over REST it is a query parameter.
                 */
                wait?: string;
            };
            header?: {
                /** @description 1 to 255 printable ASCII characters. For 24 hours, repeating a request with the same key and body has no further effect, and a request with the same key and another body is refused. */
                "Idempotency-Key"?: components["parameters"]["IdempotencyKey"];
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /** @description Up to 1 MiB. */
                    content?: string;
                    /** @description Variables of this execution only, by name, up to 256. They override all other layers. */
                    environment?: {
                        [key: string]: components["schemas"]["spool.v1.RunVariable"];
                    };
                    /** @description Application data, up to 16 KiB, returned unchanged. */
                    metadata?: components["schemas"]["spool.v1.Json"];
                    /** @description Text and images instead of content, up to 1 MiB together. */
                    parts?: components["schemas"]["spool.v1.Part"][];
                    /** @description Adapts the agent's permission policy to this execution. */
                    permissions?: components["schemas"]["spool.v1.ExecutionPermissions"];
                    /** @description Files that must be in the workspace before the agent receives the message. */
                    workspaceFiles?: components["schemas"]["spool.v1.WorkspaceFile"][];
                };
            };
        };
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.PostMessageResponse"];
                };
            };
            /** @description A successful response. */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.PostMessageResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Sessions_GetSessionState: {
        parameters: {
            query?: {
                /** @description Seq of the event; absent means the last one. */
                at?: number;
                /** @description Number of blocks: 1 to 200; 0 means 50. A page also ends at 2 MiB. */
                pageSize?: number;
                /** @description The nextPageToken of the previous page. It contains the event, so at may be omitted. */
                pageToken?: string;
                /** @description Waits up to five seconds until the read models contain this position of the session. */
                minPosition?: string;
            };
            header?: never;
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description The state of a session after one of its events. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.SessionState"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Sessions_SyncSession: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": Record<string, never>;
            };
        };
        responses: {
            /** @description A successful response. */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.SyncSessionResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Events_GetTimeline: {
        parameters: {
            query?: {
                /** @description Number of periods: 1 to 1000; 0 means 200. */
                buckets?: number;
                minPosition?: string;
            };
            header?: never;
            path: {
                session_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A summary of a session over time. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.Timeline"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    SignIn_CreateSignInCode: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": Record<string, never>;
            };
        };
        responses: {
            /** @description A successful response. */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.CreateSignInCodeResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    SignIn_GetSignInSession: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.SignInSession"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    SignIn_DeleteSignInSession: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.DeleteSignInSessionResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    SignIn_ExchangeSignInCode: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /** @description An API key instead of a code. */
                    apiKey?: string;
                    code?: string;
                    /** @description Answer with a session cookie (header Set-Cookie) instead of a session credential. Over REST only. */
                    cookie?: boolean;
                };
            };
        };
        responses: {
            /** @description A successful response. */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ExchangeSignInCodeResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Skills_ListSkills: {
        parameters: {
            query?: {
                /** @description 1 to 200; 0 means 50. */
                pageSize?: number;
                pageToken?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ListSkillsResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Skills_Push: {
        parameters: {
            query?: {
                /** @description The skill's slug, which must equal the name in the front matter; absent means that name. */
                slug?: string;
                /** @description organization (or empty), identity_account or platform. */
                scope?: components["parameters"]["Scope"];
                /** @description An organization within the tenant, or the account. */
                org?: components["parameters"]["Org"];
                /** @description A tag for the version, in addition to latest; may be repeated. */
                tag?: string[];
                /** @description Checks the ZIP without storing it. */
                dryRun?: boolean;
                /** @description SHA-256 of the ZIP, in hex: a ZIP with another SHA-256 is refused. */
                sha256?: string;
            };
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/zip": string;
            };
        };
        responses: {
            /** @description The version existed already, or the request was a dry run. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SkillPushed"];
                };
            };
            /** @description A new version. */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SkillPushed"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Skills_GetSkill: {
        parameters: {
            query?: {
                /** @description organization (or empty), identity_account or platform. */
                scope?: string;
                org?: string;
                /** @description Empty or latest, a tag, or a digest. */
                version?: string;
                /** @description Waits up to five seconds until the read models contain this position of the entry. */
                minPosition?: string;
            };
            header?: never;
            path: {
                slug: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A version of a skill. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.Skill"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Skills_RemoveSkill: {
        parameters: {
            query?: {
                scope?: string;
                org?: string;
                /** @description A digest; empty removes the whole skill. */
                version?: string;
            };
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                slug: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.RemoveResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Skills_Archive: {
        parameters: {
            query?: {
                /** @description organization (or empty), identity_account or platform. */
                scope?: components["parameters"]["Scope"];
                /** @description An organization within the tenant, or the account. */
                org?: components["parameters"]["Org"];
                /** @description Empty or latest, a tag, or a digest. */
                version?: string;
                /** @description Waits up to five seconds until the read models contain this position of the session or entry. */
                minPosition?: components["parameters"]["MinPosition"];
            };
            header?: never;
            path: {
                slug: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description The ZIP. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/zip": string;
                };
            };
            /** @description The requested range. */
            206: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/zip": string;
                };
            };
            /** @description The client's copy is current. */
            304: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
            default: components["responses"]["Problem"];
        };
    };
    Skills_TagSkill: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path: {
                slug: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    org?: string;
                    scope?: string;
                    /** @description The tag: 1 to 64 characters of a-z, 0-9, dots, hyphens and underscores. */
                    tag?: string;
                    /** @description The version to tag: a tag, or a digest. */
                    version?: string;
                };
            };
        };
        responses: {
            /** @description A successful response. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["spool.v1.ApplyResponse"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Transcripts_Put: {
        parameters: {
            query?: never;
            header?: {
                /** @description The end user of the application on whose behalf the request is made: up to 256 bytes of printable UTF-8, stored in the log and the audit. The value is asserted by the holder of the key and not verified. In gRPC: metadata spool-user, or spool-user-bin for text beyond ASCII. */
                "Spool-User"?: components["parameters"]["SpoolUser"];
            };
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/octet-stream": string;
            };
        };
        responses: {
            /** @description The transcript is valid and complete. */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["TranscriptAccepted"];
                };
            };
            default: components["responses"]["Problem"];
        };
    };
    Events_WebSocket: {
        parameters: {
            query?: {
                /** @description message authenticates the connection by its first message; headers are not evaluated then. */
                auth?: "message";
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description The WebSocket. */
            101: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
            default: components["responses"]["Problem"];
        };
    };
    Operation_Health: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Alive. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    Operation_Metrics: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description The metrics. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/plain": string;
                };
            };
        };
    };
    Operation_Ready: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Ready. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Readiness"];
                };
            };
            /** @description Not ready; checks contains the reasons. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Readiness"];
                };
            };
        };
    };
}
