package topology

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// WriteDocs writes docs/subjects.md.
func WriteDocs(w io.Writer) error {
	var b strings.Builder
	b.WriteString("<!-- Generated from pkg/topology by `make generate`; do not edit. -->\n# Subjects\n\n" +
		"All streams, subjects, buckets, durables and users of Spool in NATS. `spool up` creates them. In a cluster the `admin` user creates them once, with numbers of shards and partitions that cannot be changed later.\n")
	writeStreamDocs(&b)
	writeBucketDocs(&b)
	writeDurableDocs(&b)
	writeCoreSubjectDocs(&b)
	writeUserDocs(&b)
	_, err := io.WriteString(w, b.String())
	return err
}

// docLayout is the layout of the log that docs/subjects.md shows.
var docLayout = Layout{Shards: 1, Partitions: DefaultPartitions}

// writeStreamDocs writes the section of docs/subjects.md about the streams.
func writeStreamDocs(b *strings.Builder) {
	b.WriteString("\n## Streams\n\nThe table shows one shard with the default number of partitions. With n shards, partition p is in EVENTS-(p mod n). " +
		"Each partition is a group of the projector. The metadata of each stream records the numbers, in spool-partitions and spool-partitioned-shards. " +
		"A log of an earlier build records only spool-shards; it has 64 partitions, ev.00 to ev.3f, in 8 groups ([adr/0070](adr/0070-partitions-are-groups.md)).\n\n" +
		"| stream | subjects | kind | written by | read by | content |\n| --- | --- | --- | --- | --- | --- |\n")
	for _, s := range Streams(docLayout) {
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s |\n",
			s.Config.Name, codeSpan(shortSubjects(s.Config.Subjects)), s.Kind, s.Writes, s.Reads, s.Config.Description)
	}
	b.WriteString("\n| setting | " + "retention | discard | storage | age | messages | bytes | per subject | persist mode |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n")
	for _, s := range Streams(docLayout) {
		c := s.Config
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", c.Name, c.Retention, c.Discard, c.Storage,
			formatAge(c.MaxAge), formatLimit(c.MaxMsgs), formatLimit(c.MaxBytes), formatLimit(c.MaxMsgsPerSubject), c.PersistMode)
	}
	b.WriteString("\nThe subjects, token by token:\n\n")
	for _, l := range subjectLines() {
		fmt.Fprintf(b, "- %s: %s\n", codeSpan(l[0]), l[1])
	}
}

// subjectLines returns the subject patterns of the streams, each with its description.
func subjectLines() [][2]string {
	return [][2]string{
		{"ev.<partition>.<tenant>.<session>.life", "commands and decisions on a session; written by the session service"},
		{"ev.<partition>.<tenant>.<session>.run", "events of its executions; written by the executor that holds the epoch"},
		{"ev.<partition>.<tenant>.<catalogue id>.key", "an API key"},
		{"ev.<partition>.<tenant>.<catalogue id>.agent", "versions of an agent; .instance and .environment are alike; written by the session service"},
		{"ev.<partition>.<tenant>.<catalogue id>.skill", "versions of a skill; written by the skills service"},
		{"dl.<partition>.<tenant>.<session>", "deltas: text of blocks that are not complete"},
		{CommandPattern, "a command; the id is that of its target"},
		{ProviderJobSubject("<provider>"), "a job for any executor of the provider"},
		{EngineJobSubject("<provider>", "<engine>"), "a job for the executors of one engine"},
		{TimerScheduleSubject("<session>"), "the session's schedule"},
		{TimerDueSubject("<session>"), "the fired schedule of a session"},
		{DeadSubject("<origin>"), "a message whose processing was given up"},
	}
}

// CommandPattern is the subject pattern of commands, see CommandSubject.
const CommandPattern = "cmd.<service>.<partition>.<tenant>.<id>"

// writeBucketDocs writes the section of docs/subjects.md about the buckets.
func writeBucketDocs(b *strings.Builder) {
	b.WriteString("\n## Buckets\n\n| bucket | kind | names | age | storage | written by | read by | content |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n")
	for _, k := range KeyValueBuckets() {
		fmt.Fprintf(b, "| %s | key-value | %s | %s | %s | %s | %s | %s |\n", k.Config.Bucket, codeSpan(k.Keys), formatAge(k.Config.TTL), k.Config.Storage, k.Writes, k.Reads, k.Config.Description)
	}
	for _, o := range ObjectBuckets() {
		fmt.Fprintf(b, "| %s | objects | %s | %s | %s | %s | %s | %s |\n", o.Config.Bucket, codeSpan(o.Names), formatAge(o.Config.TTL), o.Config.Storage, o.Writes, o.Reads, o.Config.Description)
	}
}

// writeDurableDocs writes the section of docs/subjects.md about the durables.
func writeDurableDocs(b *strings.Builder) {
	b.WriteString("\n## Durables\n\n| durable | stream | filter | ack wait | deliveries | pending |\n| --- | --- | --- | --- | --- | --- |\n")
	for _, d := range []Durable{SessionCommandsConsumer(), ReactorConsumer(0, docLayout.Partitions), TimersConsumer(), ProviderJobsConsumer("<provider>"), EngineJobsConsumer("<provider>", "<engine>")} {
		filters := d.Config.FilterSubjects
		if d.Config.FilterSubject != "" {
			filters = []string{d.Config.FilterSubject}
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s |\n", codeSpan(d.Config.Durable), d.Stream, codeSpan(strings.Join(filters, ", ")),
			d.Config.AckWait, formatLimit(int64(d.Config.MaxDeliver)), formatLimit(int64(d.Config.MaxAckPending)))
	}
}

// writeCoreSubjectDocs writes the section of docs/subjects.md about the subjects of core NATS.
func writeCoreSubjectDocs(b *strings.Builder) {
	b.WriteString("\n## Core subjects\n\nNo durable state depends on these subjects.\n\n")
	fmt.Fprintf(b, "- %s: hints to an executor that an event was stored, and requests for its current work on a session.\n", codeSpan(ExecutorCtlSubject("<executor>")))
	fmt.Fprintf(b, "- %s: a projector announces changes of the read models of a session; gateways subscribe. No stream stores them: a gateway that misses one reads Postgres (adr/0068).\n", codeSpan("live.<tenant>.<session>"))
	fmt.Fprintf(b, "- %s: a projector started; gateways look for events that they missed.\n", codeSpan(ProjectorStartSubject))
	fmt.Fprintf(b, "- %s: a gateway asks the executors of an engine for a file of a running sandbox, which it sends in chunks on %s; the gateway acknowledges them on %s (adr/0038).\n", codeSpan(FilesRequestSubject("<provider>", "<engine>")), codeSpan(FilesResponseSubject("<transfer>")), codeSpan(FilesAckSubject("<transfer>")))
	fmt.Fprintf(b, "- %s: inboxes of a user; the response to a command is sent to the subject in header %s.\n", codeSpan("_INBOX_<user>.>"), codeSpan(HeaderReply))
}

// writeUserDocs writes the section of docs/subjects.md about the users and their permissions.
func writeUserDocs(b *strings.Builder) {
	fmt.Fprintf(b, "\n## Accounts\n\nAccount %s owns JetStream; users admin and gate are in it. Each service has an account of its own, which imports what its user "+
		"may publish and nothing else, so that the response to a request stays in the requesting account ([adr/0042](adr/0042-nats-accounts.md)). "+
		"Requests for consumers, %s, reach JetStream through the gate, on %s.\n", codeSpan(AccountLog), codeSpan(consumerCreatePrefix+">"), codeSpan(GatePrefix+"<user>.>"))
	fmt.Fprintf(b, "\n## Users\n\nEach service has a NATS user with these rights and no others; inboxes have the prefix %s. "+
		"Only the janitor may delete messages, and purge two key-value buckets. EVENTS-n means each of the %d possible shards.\n", codeSpan("_INBOX_<user>"), MaxShards)
	for _, u := range Users() {
		fmt.Fprintf(b, "\n### %s\n\n%s.\n\n- publish: %s\n- subscribe: %s\n", u.Name, u.Doc, formatPermissions(u.Publish), formatPermissions(u.Subscribe))
	}
}

// formatPermissions formats the permissions on shard 0 as EVENTS-n and omits those on the other shards.
func formatPermissions(list []string) string {
	var out []string
	seen := map[string]bool{}
	for _, s := range list {
		skip := false
		for i := 1; i < MaxShards; i++ {
			skip = skip || strings.Contains(s, EventsStreamName(i))
		}
		s = strings.ReplaceAll(strings.ReplaceAll(s, EventsStreamName(0), "EVENTS-n"), ReactorDurable(0), "reactor-n")
		if !skip && !seen[s] {
			seen[s] = true
			out = append(out, codeSpan(s))
		}
	}
	return strings.Join(out, ", ")
}

// codeSpan returns s as code in Markdown.
func codeSpan(s string) string { return "`" + s + "`" }

// formatAge formats a duration for the documents; 0 means no limit.
func formatAge(d time.Duration) string {
	switch {
	case d == 0:
		return "no limit"
	case d%(24*time.Hour) == 0:
		return fmt.Sprintf("%d d", d/(24*time.Hour))
	}
	return d.String()
}

// formatLimit formats a limit for the documents.
func formatLimit(n int64) string {
	if n <= 0 {
		return "no limit"
	}
	return fmt.Sprint(n)
}
