package reads

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads/queries"
)

// Filter selects and sorts a list of sessions or executions. Its fields are those of the API. The zero Filter selects
// all, newest first.
type Filter struct {
	State        string // status of sessions or phase of executions
	Agent        string // reference
	Architecture string
	Parent       string // id of the session that the listed sessions were forked from

	Phases           []string `json:",omitempty"` // phases of sessions, sorted and without duplicates; empty means all
	HasOpenApprovals *bool    `json:",omitempty"` // of sessions

	MetadataKey   string
	MetadataValue *string

	CreatedAfter, CreatedBefore string // RFC 3339
	UpdatedAfter, UpdatedBefore string

	Text  string // substring
	Sort  string // created, updated
	Order string // desc, asc

	Agents []string // slugs of the only agents that the caller may see; empty means all
}

// Limits of Filter fields.
const (
	maxFilterText   = 256  // characters
	maxMetadataTerm = 1024 // bytes of a metadata field's name, and of its value
)

// listTable describes a table whose rows the API lists: sessions or executions. The rows are filtered and sorted under
// the SQL alias x.
type listTable struct {
	name     string // sessions, executions
	state    string // name of the column and of the parameter for Filter.State
	states   []string
	created  string   // column with the time of creation
	texts    []string // columns that Filter.Text searches
	owner    string   // alias of the sessions row with agent and architecture
	updated  []string // columns to sort by; the first may be a coarser time than the last
	rowQuery string   // the statement for one row, which has the columns and joins of the list
}

// sessionTable returns the listTable of sessions, with the columns of the API's list.
func sessionTable() listTable {
	return listTable{
		name: "sessions", state: "status", states: []string{"open", "closed"}, created: "created_at",
		texts: []string{"title", "metadata"}, owner: "x", updated: []string{"updated_minute", "updated_at"},
		rowQuery: queries.Session,
	}
}

// executionTable returns the listTable of executions, with the columns of the API's list.
func executionTable() listTable {
	return listTable{
		name: "executions", state: "phase", states: executionPhases, created: "queued_at",
		texts: []string{"query", "result", "metadata"}, owner: "s", updated: []string{"updated_at"},
		rowQuery: queries.Execution,
	}
}

// statementBuilder collects the conditions and the arguments of an SQL statement.
type statementBuilder struct {
	where []string
	args  []any
}

// addArgument adds an argument to the SQL statement and returns its placeholder.
func (q *statementBuilder) addArgument(v any) string {
	q.args = append(q.args, v)
	return "$" + strconv.Itoa(len(q.args))
}

// addCondition adds a condition to the SQL statement. Each %s of the condition is replaced by the placeholder of an
// argument.
func (q *statementBuilder) addCondition(condition string, args ...any) {
	holders := make([]any, len(args))
	for i, a := range args {
		holders[i] = q.addArgument(a)
	}
	q.where = append(q.where, fmt.Sprintf(condition, holders...))
}

// readListPage returns the page of a list that begins at a page token, and reports whether there are more rows. R is
// the type of a row of the list.
func readListPage[R any](ctx context.Context, s *Store, l listTable, tenant string, f Filter, token string, size uint32) (list []R, more bool, err error) {
	sql, args, err := l.pageStatement(tenant, f, token, size)
	if err != nil {
		return nil, false, err
	}
	rows, err := s.db.Query(ctx, sql, args...)
	if err != nil {
		return nil, false, err
	}
	list, err = pgx.CollectRows(rows, pgx.RowToStructByPos[R])
	list, more = trimPage(list, size)
	return list, more, err
}

// pageStatement returns the statement of the page that begins at a token. The inner statement returns only the rows of the
// page, and one more, so that only these are joined with other tables.
//
// The statement is not in package queries: its order and its conditions are chosen by the filter, each with an index of
// its own, and a prepared statement with optional conditions can get a generic plan, which uses the index of none.
func (l listTable) pageStatement(tenant string, f Filter, token string, size uint32) (sql string, args []any, err error) {
	q := &statementBuilder{}
	q.addCondition("x.tenant = %s", tenant)
	joins, err := l.addFilter(q, f)
	if err != nil {
		return "", nil, err
	}
	if f.Sort, err = parseChoice("sort", f.Sort, "created", "updated"); err != nil {
		return "", nil, err
	}
	if f.Order, err = parseChoice("order", f.Order, "desc", "asc"); err != nil {
		return "", nil, err
	}
	after, err := l.decodeToken(f, token)
	if err != nil {
		return "", nil, err
	}
	keys := []string{l.created}
	if f.Sort == "updated" {
		keys = l.updated
	}
	compare := map[string]string{"desc": "<", "asc": ">"}[f.Order]
	if after != nil {
		if len(keys) == 2 { // the coarser column selects the part of the index; the pair decides
			q.addCondition("x."+keys[0]+" "+compare+"= date_trunc('minute', %s::timestamptz AT TIME ZONE 'UTC')", after.at)
		}
		q.addCondition("(x."+keys[len(keys)-1]+", x.id) "+compare+" (%s, %s)", after.at, after.id)
	}
	by := func(alias string) string {
		var terms []string
		for _, k := range append(slices.Clone(keys), "id") {
			terms = append(terms, alias+"."+k+" "+f.Order)
		}
		return strings.Join(terms, ", ")
	}
	columns, outer, _ := strings.Cut(l.rowQuery, "\nFROM "+l.name+"\n")
	outer, _, _ = strings.Cut(outer, "\nWHERE ")
	sql = fmt.Sprintf("%s\nFROM (SELECT x.* FROM %s x%s WHERE %s ORDER BY %s LIMIT %s) AS %s\n%s\nORDER BY %s",
		columns, l.name, joins, strings.Join(q.where, " AND "), by("x"), q.addArgument(size+1), l.name, outer, by(l.name))
	return sql, q.args, nil
}

// addFilter adds the conditions of a filter to an SQL statement, and returns the joins that these conditions need.
func (l listTable) addFilter(q *statementBuilder, f Filter) (joins string, err error) {
	if f.State != "" {
		if !slices.Contains(l.states, f.State) {
			return "", problem.Invalid(l.state, "%+q is not a %s: there are %s", truncate.Text(f.State, 64), l.state, strings.Join(l.states, ", "))
		}
		q.addCondition("x."+l.state+" = %s", f.State)
	}
	if (f.Agent != "" || f.Architecture != "" || len(f.Agents) > 0) && l.owner != "x" {
		joins = " JOIN sessions " + l.owner + " ON " + l.owner + ".tenant = x.tenant AND " + l.owner + ".id = x.session"
		q.addCondition(l.owner+".tenant = %s", q.args[0])
	}
	if len(f.Agents) > 0 {
		q.addCondition(l.owner+".agent = ANY (%s)", f.Agents)
	}
	if f.Agent != "" {
		if err := l.addAgentCondition(q, f.Agent); err != nil {
			return "", err
		}
	}
	if f.Architecture != "" {
		name, ok := architecture.Canonical(f.Architecture)
		if !ok {
			return "", problem.Invalid("architecture", "%+q is not an architecture: there are %s", truncate.Text(f.Architecture, 64), architecture.FormatNames())
		}
		q.addCondition(l.owner+".architecture = %s", name)
	}
	if f.Parent != "" {
		if err := events.CheckID("parent", events.KindSession, f.Parent); err != nil {
			return "", problem.Invalid("parent", "%s", err.Error())
		}
		q.addCondition("x.parent = %s AND x.parent <> ''", f.Parent) // the condition of the partial index
	}
	if err := addSessionPhaseConditions(q, f); err != nil {
		return "", err
	}
	if err := l.addMetadataCondition(q, f); err != nil {
		return "", err
	}
	if err := l.addTimeConditions(q, f); err != nil {
		return "", err
	}
	return joins, l.addTextCondition(q, f.Text)
}

// sessionPhases are the phases of sessions in the read models.
var sessionPhases = []string{"queued", "running", "waiting_for_approval", "failed", "idle"}

// addSessionPhaseConditions adds the conditions for the phase and the open approval requests of sessions.
func addSessionPhaseConditions(q *statementBuilder, f Filter) error {
	for _, p := range f.Phases {
		if !slices.Contains(sessionPhases, p) {
			return problem.Invalid("phase", "%+q is not a phase: there are %s", truncate.Text(p, 64), strings.Join(sessionPhases, ", "))
		}
	}
	switch len(f.Phases) {
	case 0:
	case 1: // the index returns the rows of one phase in the order of their creation
		q.addCondition("x.phase = %s", f.Phases[0])
	default:
		q.addCondition("x.phase = ANY (%s)", f.Phases)
	}
	if f.HasOpenApprovals != nil {
		condition := map[bool]string{true: "x.open_approvals > 0", false: "x.open_approvals = 0"}[*f.HasOpenApprovals]
		q.where = append(q.where, condition) // the first one is the condition of the partial index
	}
	return nil
}

// addAgentCondition adds a condition for the sessions of an agent, in any version or in one.
func (l listTable) addAgentCondition(q *statementBuilder, s string) error {
	ref, err := events.ParseReference(s)
	switch {
	case err != nil:
		return problem.Invalid("agent", "%s", err.Error())
	case ref.Version != "" && !events.IsDigest(ref.Version):
		return problem.Invalid("agent", "tag %+q can move to another version: give a digest, or no version for all versions", truncate.Text(ref.Version, 64))
	}
	q.addCondition(l.owner+".agent = %s", ref.Slug)
	switch {
	case ref == (events.Reference{Slug: builtInAgent}):
		q.where = append(q.where, l.owner+".agent_ref = ''")
	case ref.Version != "":
		q.addCondition(l.owner+".agent_ref = %s", ref.String())
	default:
		q.addCondition("split_part("+l.owner+".agent_ref, '@', 1) = %s", ref.String())
	}
	return nil
}

// builtInAgent is the slug in a filter for sessions that name no agent, which the built-in agent runs.
const builtInAgent = "default"

// addMetadataCondition adds a condition for a field of the application's metadata. The condition must be built in the
// same way as the SQL function metadata_terms.
func (l listTable) addMetadataCondition(q *statementBuilder, f Filter) error {
	switch {
	case f.MetadataKey == "" && f.MetadataValue != nil:
		return problem.Invalid("metadataValue", "metadataValue requires metadataKey")
	case f.MetadataKey == "":
		return nil
	}
	term := q.args[0].(string) + "/" + strconv.Itoa(utf8.RuneCountInString(f.MetadataKey)) + "/" + f.MetadataKey
	if err := checkFilterText("metadataKey", f.MetadataKey, maxMetadataTerm); err != nil {
		return err
	}
	if f.MetadataValue != nil {
		if err := checkFilterText("metadataValue", *f.MetadataValue, maxMetadataTerm); err != nil {
			return err
		}
		term += "/" + *f.MetadataValue
	}
	q.addCondition("metadata_terms(x.tenant, x.metadata) @> ARRAY[md5(%s)]", term)
	return nil
}

// checkFilterText returns an error for text of a filter that has more than maxBytes bytes or that Postgres cannot
// store.
func checkFilterText(field, s string, maxBytes int) error {
	switch {
	case !utf8.ValidString(s):
		return problem.Invalid(field, "value is not valid UTF-8")
	case strings.IndexByte(s, 0) >= 0:
		return problem.Invalid(field, "value contains U+0000")
	case len(s) > maxBytes:
		return problem.Invalid(field, "value has %d bytes; the limit is %d", len(s), maxBytes)
	}
	return nil
}

// addTimeConditions adds conditions for ranges of time, which include the first bound and exclude the second.
func (l listTable) addTimeConditions(q *statementBuilder, f Filter) error {
	for _, r := range []struct{ name, column, after, before string }{
		{"created", l.created, f.CreatedAfter, f.CreatedBefore},
		{"updated", l.updated[len(l.updated)-1], f.UpdatedAfter, f.UpdatedBefore},
	} {
		after, err := parseTime(r.name+"After", r.after)
		if err != nil {
			return err
		}
		before, err := parseTime(r.name+"Before", r.before)
		if err != nil {
			return err
		}
		if !after.IsZero() && !before.IsZero() && !after.Before(before) {
			return problem.Invalid(r.name+"Before", "value is not later than %sAfter, so the range is empty", r.name)
		}
		coarse := r.name == "updated" && len(l.updated) == 2
		for _, bound := range []struct {
			at      time.Time
			compare string
		}{{after, ">="}, {before, "<"}} {
			if bound.at.IsZero() {
				continue
			}
			q.addCondition("x."+r.column+" "+bound.compare+" %s", bound.at)
			if coarse {
				q.addCondition("x."+l.updated[0]+" "+bound.compare[:1]+"= date_trunc('minute', %s::timestamptz AT TIME ZONE 'UTC')", bound.at)
			}
		}
	}
	return nil
}

// parseTime parses the time of a filter, in the format of RFC 3339; "" is the zero time.
func parseTime(field, s string) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil || t.Year() < 1 {
		return t, problem.Invalid(field, "%+q is not a time in RFC 3339, such as 2026-01-31T12:00:00Z", truncate.Text(s, 64))
	}
	return t, nil
}

// addTextCondition adds the condition that a row contains the text s. No index supports it: Postgres reads all rows
// of the tenant that the other conditions select.
func (l listTable) addTextCondition(q *statementBuilder, s string) error {
	if s == "" {
		return nil
	}
	if err := checkFilterText("text", s, 4*maxFilterText); err != nil {
		return err
	}
	if n := utf8.RuneCountInString(s); n > maxFilterText {
		return problem.Invalid("text", "value has %d characters; the limit is %d", n, maxFilterText)
	}
	holder := q.addArgument(s)
	var any []string
	for _, column := range l.texts {
		any = append(any, "strpos(lower(x."+column+"), lower("+holder+")) > 0")
	}
	q.where = append(q.where, "("+strings.Join(any, " OR ")+")")
	return nil
}

// parseChoice returns s if it is one of the known values, or the first known value if s is empty.
func parseChoice(field, s string, known ...string) (string, error) {
	if s == "" {
		return known[0], nil
	}
	if !slices.Contains(known, s) {
		return "", problem.Invalid(field, "%+q is not supported: there are %s", truncate.Text(s, 64), strings.Join(known, " and "))
	}
	return s, nil
}

// pagePosition is the position in a list at which a page ended: the time by which the list is sorted and the id, both
// of the page's last row.
type pagePosition struct {
	at time.Time
	id string
}

// pageToken is the encoded form of a pagePosition. It is opaque to clients, so that it may change.
type pageToken struct {
	Filter string `json:"f"` // digest of the filter and sort order
	Micros int64  `json:"t"`
	ID     string `json:"i"`
}

// filterDigest returns a digest of a filter, with its defaults set, by which a page token of another filter is
// recognized.
func (l listTable) filterDigest(f Filter) string {
	b, err := json.Marshal(struct {
		Name   string
		Filter Filter
	}{l.name, f})
	if err != nil { // strings always encode
		panic(err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8])
}

// encodeToken returns the token of the page of a list that follows the position p.
func (l listTable) encodeToken(f Filter, p pagePosition) string {
	f.Sort, f.Order = orDefault(f.Sort, "created"), orDefault(f.Order, "desc")
	b, err := json.Marshal(pageToken{l.filterDigest(f), p.at.UnixMicro(), p.id})
	if err != nil {
		panic(err)
	}
	return base64.RawURLEncoding.EncodeToString(b)
}

// orDefault returns s, or unset if s is empty.
func orDefault(s, unset string) string {
	if s == "" {
		return unset
	}
	return s
}

// decodeToken decodes a page token of encodeToken, which must be that of this list with this filter and sort order.
// It returns nil for the first page.
func (l listTable) decodeToken(f Filter, token string) (*pagePosition, error) {
	if token == "" {
		return nil, nil
	}
	var t pageToken
	b, err := base64.RawURLEncoding.DecodeString(token)
	if err == nil {
		err = json.Unmarshal(b, &t)
	}
	kind := events.KindSession
	if l.name == "executions" {
		kind = events.KindExecution
	}
	if err != nil || events.CheckID("pageToken", kind, t.ID) != nil || t.Filter == "" {
		return nil, problem.Invalid("pageToken", "%s is not the nextPageToken of a page of this list", fmt.Sprintf("%+q", truncate.Text(token, 64)))
	}
	if t.Filter != l.filterDigest(f) {
		return nil, problem.Invalid("pageToken", "the token belongs to a page with another filter or sort order; start again without it")
	}
	return &pagePosition{time.UnixMicro(t.Micros).UTC(), t.ID}, nil
}
