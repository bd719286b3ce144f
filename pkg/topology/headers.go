package topology

// Headers of messages on NATS. In a watermill message each is a metadata key of the same name.
const (
	// HeaderSignature is a commit's signature: role/id of the key/HMAC in hexadecimal. See eventlog.Keys.
	HeaderSignature = "Spool-Signature"
	// HeaderReply is the core NATS subject to which the response to a command is sent.
	HeaderReply = "Spool-Reply"
	// HeaderTimeToLive is the time that the client waits for a command's effect, from when the stream stored the
	// command, as a Go duration ("3s"). After that time the command is dropped. It depends only on the server's
	// clock.
	HeaderTimeToLive = "Spool-Time-To-Live"
	// HeaderDeadline is the predecessor of HeaderTimeToLive in earlier builds: a deadline by the sender's clock, in
	// RFC 3339.
	HeaderDeadline = "Spool-Deadline"
	// HeaderCommandID is the id of a command in all its deliveries and retries. It makes a repeated command a
	// no-op.
	HeaderCommandID = "Spool-Command-Id"
	// HeaderCorrelation is the id of the message's original cause. Messages that a handler publishes inherit it.
	HeaderCorrelation = "Spool-Correlation-Id"
	// HeaderMessageID is watermill's UUID of the message. It is not the id that JetStream uses for deduplication.
	HeaderMessageID = "Spool-Message-Id"

	// HeaderDeadReason is the reason why a message is in DEAD, in one sentence.
	HeaderDeadReason = "Spool-Dead-Reason"
	// HeaderDeadSubject is the header of a dead letter with the subject of the message that could not be processed.
	HeaderDeadSubject = "Spool-Dead-Subject"
	// HeaderDeadMessageID is the header of a dead letter with the id of the message that could not be processed.
	HeaderDeadMessageID = "Spool-Dead-Message-Id"
	// HeaderDeadStream is the header of a dead letter with the stream of the message that could not be processed.
	HeaderDeadStream = "Spool-Dead-Stream"
	// HeaderDeadSequence is the sequence of a dead message in its original stream, in decimal.
	HeaderDeadSequence = "Spool-Dead-Sequence"
	// HeaderDeadDelivered is the number of deliveries of a dead message, in decimal.
	HeaderDeadDelivered = "Spool-Dead-Delivered"
	// HeaderDeadHandler is the name of the Router handler that gave up.
	HeaderDeadHandler = "Spool-Dead-Handler"
	// HeaderDeadTime is the time at which the service gave up the message, in RFC 3339 with nanoseconds, UTC.
	HeaderDeadTime = "Spool-Dead-Time"
)
