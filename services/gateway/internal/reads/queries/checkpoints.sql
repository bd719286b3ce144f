-- name: Checkpoints :many
SELECT grp, shard, position, caught_up, lag_ms FROM checkpoints;

-- name: Checkpoint :one
SELECT shard, position, caught_up FROM checkpoints WHERE grp = @grp;

-- name: MissingSession :one
-- MissingSession returns why a session may have no row: it was deleted, or its group has not caught up.
SELECT c.caught_up, EXISTS (SELECT FROM deleted_sessions d WHERE d.tenant = @tenant AND d.id = @session) AS deleted
  FROM checkpoints c WHERE c.grp = @grp;
