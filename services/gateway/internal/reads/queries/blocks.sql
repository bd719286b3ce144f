-- name: BlocksAt :many
-- BlocksAt returns blocks after a position in display order. The block is empty in rows after the one that exceeds the number of bytes.
SELECT coalesce(CASE WHEN before <= @bytes::bigint THEN block END, '')::text AS block, execution_ord, first_seq, last_seq FROM (
  SELECT first.*, sum(octet_length(first.block)) OVER (ORDER BY first.execution_ord, first.first_seq) - octet_length(first.block) AS before FROM (
    SELECT b.block, b.execution_ord, b.first_seq, b.last_seq FROM blocks b
     WHERE b.tenant = @tenant AND b.session = @session AND (b.execution_ord, b.first_seq) > (@after_ord::bigint, @after_seq::bigint)
       AND b.execution_ord < @executions::bigint AND b.first_seq <= @seq
     ORDER BY b.execution_ord, b.first_seq LIMIT @size) first) page
 ORDER BY execution_ord, first_seq;

-- name: BlocksSince :many
-- BlocksSince returns blocks that began after one event and up to another, or whose first event is listed, as BlocksAt does.
SELECT coalesce(CASE WHEN before <= @bytes::bigint THEN block END, '')::text AS block, execution_ord, first_seq, last_seq FROM (
  SELECT first.*, sum(octet_length(first.block)) OVER (ORDER BY first.execution_ord, first.first_seq) - octet_length(first.block) AS before FROM (
    SELECT b.block, b.execution_ord, b.first_seq, b.last_seq FROM blocks b
     WHERE b.tenant = @tenant AND b.session = @session AND b.execution_ord < @executions::bigint AND b.first_seq <= @seq
       AND (b.first_seq > @since OR b.first_seq = ANY (@changed::bigint[]))
     ORDER BY b.execution_ord, b.first_seq LIMIT @size) first) page
 ORDER BY execution_ord, first_seq;

-- name: Tip :many
-- Tip returns the end of a session, once for each pending block with its block_start, or once without a block.
SELECT s.tip, s.tip_position, s.metadata, b.id AS block, b.execution, b.conversation, coalesce(e.event, '')::text AS start FROM sessions s
  LEFT JOIN blocks b ON b.tenant = s.tenant AND b.session = s.id AND b.status = 'pending'
  LEFT JOIN events e ON e.tenant = b.tenant AND e.session = b.session AND e.seq = b.first_seq
 WHERE s.tenant = @tenant AND s.id = @session ORDER BY b.first_seq;

-- name: Tips :many
-- Tips returns the last event of sessions.
SELECT id, tip FROM sessions WHERE tenant = @tenant AND id = ANY (@sessions::text[]);
