-- name: Events :many
-- Events returns a page of events, which ends after the event that exceeds the number of bytes, or one row without an event. oldest is the
-- seq of the first event of any type after the cursor.
SELECT s.tip, coalesce(o.seq, 0)::bigint AS oldest, coalesce(e.seq, 0)::bigint AS seq, coalesce(e.type, '')::text AS type,
       coalesce(e.event, '')::text AS event
  FROM sessions s
  LEFT JOIN LATERAL (SELECT f.seq FROM events f WHERE f.tenant = s.tenant AND f.session = s.id AND f.seq > @after ORDER BY f.seq LIMIT 1) o ON true
  LEFT JOIN LATERAL (SELECT page.seq, page.type, page.event FROM (
      SELECT v.seq, v.type, v.event, sum(octet_length(v.event)) OVER (ORDER BY v.seq) - octet_length(v.event) AS before FROM events v
       WHERE v.tenant = s.tenant AND v.session = s.id AND v.seq > @after
         AND (sqlc.narg('types')::text[] IS NULL OR v.type = ANY (sqlc.narg('types')::text[])) ORDER BY v.seq LIMIT @size) page
     WHERE page.before <= @bytes::bigint) e ON true
 WHERE s.tenant = @tenant AND s.id = @session ORDER BY e.seq;

-- name: EventMetadata :many
-- EventMetadata returns a row without a value if the session exists; the last event up to one seq, and all events after it up to another,
-- that set the session's metadata; and the metadata of executions. It repeats the predicate of the index events_metadata.
SELECT 0::bigint AS seq, NULL::text AS execution, NULL::text AS value FROM sessions s WHERE s.tenant = @tenant AND s.id = @session
UNION ALL
(SELECT e.seq, NULL, e.event FROM events e WHERE e.tenant = @tenant AND e.session = @session AND e.seq <= @first
   AND e.type IN ('session_created', 'session_options_updated') AND strpos(e.event, '"metadata":') > 0 ORDER BY e.seq DESC LIMIT 1)
UNION ALL
SELECT e.seq, NULL, e.event FROM events e WHERE e.tenant = @tenant AND e.session = @session AND e.seq > @first AND e.seq <= @last
   AND e.type IN ('session_created', 'session_options_updated') AND strpos(e.event, '"metadata":') > 0
UNION ALL
SELECT 0, x.id, x.metadata FROM executions x
 WHERE x.tenant = @tenant AND x.session = @session AND x.id = ANY (@executions::text[]) AND x.metadata IS NOT NULL
ORDER BY seq;

-- name: SnapshotEvent :one
-- SnapshotEvent returns the event that names a snapshot. seq 0 means any event.
SELECT event FROM events WHERE tenant = @tenant AND session = @session AND (@seq::bigint = 0 OR seq = @seq)
   AND type = 'workspace_synced' AND event::json -> 'data' ->> 'snapshot' = @snapshot::text ORDER BY seq LIMIT 1;
