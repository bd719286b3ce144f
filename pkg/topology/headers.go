package topology

// Headers of messages on NATS. In a watermill message each is a metadata key of the same name.
const (
	// HeaderSignature is a commit's signature: role/id of the key/HMAC in hexadecimal. See eventlog.Keys.
	HeaderSignature = "Spool-Signature"
	// HeaderReply is the subject on core NATS that the answer to a command goes to.
	HeaderReply = "Spool-Reply"
	// HeaderTimeToLive is how long somebody waits for a command's effect, from when the stream stored it, as a duration of Go ("3s");
	// past it the command is dropped. It says nothing about anybody's clock but the server's.
	HeaderTimeToLive = "Spool-Time-To-Live"
	// HeaderDeadline is what builds before HeaderTimeToLive sent: the same as a time of the sender's clock, in RFC 3339.
	HeaderDeadline = "Spool-Deadline"
	// HeaderCommandID names the command over all its deliveries and retries, so that a repeat changes nothing.
	HeaderCommandID = "Spool-Command-Id"
	// HeaderCorrelation names the cause that a message goes back to; what a handler publishes inherits it.
	HeaderCorrelation = "Spool-Correlation-Id"
	// HeaderMessageID is the message's own id (watermill's UUID). It is not NATS's id for deduplication.
	HeaderMessageID = "Spool-Message-Id"

	// HeaderDeadReason says, in one sentence, why a message lies in DEAD.
	HeaderDeadReason = "Spool-Dead-Reason"
	// HeaderDeadSubject is the subject that a dead message was published to.
	HeaderDeadSubject = "Spool-Dead-Subject"
	// HeaderDeadMessageID is the id that a dead message had.
	HeaderDeadMessageID = "Spool-Dead-Message-Id"
	// HeaderDeadStream is the stream that a dead message came from.
	HeaderDeadStream = "Spool-Dead-Stream"
	// HeaderDeadSequence is a dead message's sequence in that stream, in decimal.
	HeaderDeadSequence = "Spool-Dead-Sequence"
	// HeaderDeadDelivered is how often a dead message had been delivered, in decimal.
	HeaderDeadDelivered = "Spool-Dead-Delivered"
	// HeaderDeadHandler is the name of the Router handler that gave the message up.
	HeaderDeadHandler = "Spool-Dead-Handler"
	// HeaderDeadTime is when the message was given up, in RFC 3339 with nanoseconds, UTC.
	HeaderDeadTime = "Spool-Dead-Time"
)
