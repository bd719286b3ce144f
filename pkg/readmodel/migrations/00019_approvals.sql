-- +goose Up

-- Requests that a person decides. No event before this migration is one: there is nothing to fold again.
CREATE TABLE approvals (
    tenant        text NOT NULL,
    session       text NOT NULL,
    id            text NOT NULL,
    execution     text NOT NULL,
    conversation  text NOT NULL,
    kind          text NOT NULL,             -- tool, plan, question, elicitation
    tool_name     text NOT NULL,
    tool_use_id   text NOT NULL,
    title         text NOT NULL,             -- one line
    status        text NOT NULL,             -- pending; decided: the agent has not received the decision yet; approved, rejected, skipped, answered, retracted
    cause         text NOT NULL DEFAULT '',  -- person, class or timeout; of a retracted request the reason
    request       text NOT NULL,             -- JSON of events.ApprovalRequested
    verdict       text NOT NULL DEFAULT '',  -- approve, approve_all, skip, reject, answer; '' if no person has decided
    decision      text,                      -- JSON of events.ApprovalDecided; null for none
    actor         text,                      -- JSON of the events.Actor that decided, without service and address; null for none
    requested_seq bigint NOT NULL,
    requested_at  timestamptz NOT NULL,
    decided_seq   bigint NOT NULL DEFAULT 0, -- 0 for none
    decided_at    timestamptz,
    ended_seq     bigint NOT NULL DEFAULT 0, -- 0 while it is open
    ended_at      timestamptz,
    PRIMARY KEY (tenant, session, id)
) WITH (fillfactor = 80);

CREATE INDEX approvals_by_id ON approvals (tenant, id);
CREATE INDEX approvals_by_time ON approvals (tenant, requested_at, id);
CREATE INDEX approvals_open ON approvals (tenant, requested_at, id) WHERE ended_seq = 0;
CREATE INDEX approvals_by_session ON approvals (tenant, session, requested_seq);

ALTER TABLE executions ADD COLUMN open_approvals integer NOT NULL DEFAULT 0; -- its approvals without ended_seq

-- +goose Down
DROP TABLE approvals;
ALTER TABLE executions DROP COLUMN open_approvals;
