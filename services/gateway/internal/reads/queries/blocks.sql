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
-- Tip returns the end of a session, once for each pending block, or once without a block.
SELECT s.tip, s.tip_position, s.metadata, b.id AS block, b.execution, b.conversation, t.offsets, t.texts, t.at FROM sessions s
  LEFT JOIN blocks b ON b.tenant = s.tenant AND b.session = s.id AND b.status = 'pending'
  LEFT JOIN LATERAL (SELECT array_agg(f."offset" ORDER BY f."offset")::bigint[] AS offsets, array_agg(f.text ORDER BY f."offset")::text[] AS texts,
                            coalesce(max(f.at), 'epoch')::timestamptz AS at
                       FROM text_in_flight f WHERE f.tenant = s.tenant AND f.session = s.id AND f.block = b.id) t ON true
 WHERE s.tenant = @tenant AND s.id = @session ORDER BY b.first_seq;

-- name: Reaches :many
-- Reaches returns sessions, once for each block with text in flight, or once with the empty block.
SELECT s.id, s.tip, coalesce(t.block, '')::text AS block, coalesce(t.text_end, 0)::bigint AS text_end FROM sessions s
  LEFT JOIN LATERAL (SELECT f.block, max(f."offset" + octet_length(f.text)) AS text_end FROM text_in_flight f
                      WHERE f.tenant = s.tenant AND f.session = s.id GROUP BY f.block) t ON true
 WHERE s.tenant = @tenant AND s.id = ANY (@sessions::text[]);
