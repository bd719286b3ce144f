// Package bus implements watermill's Publisher and Subscriber on NATS JetStream, and the Router for command and job
// handlers.
//
// A topic is a subject. Publisher returns when JetStream has stored the message. Subscriber reads a durable pull
// consumer: it requests a message only when a slot is free, so that no message waits in a buffer while its AckWait
// runs. It sends a heartbeat every third of AckWait, so that a handler may run for an hour.
//
// Handlers are registered with Router.Handle and nowhere else: Subscribe returns an error to a caller that is not a
// Router, and a handler can check with RequireRouted. The Router provides recovery, correlation, deadlines, timeouts,
// retries and dead letters. A handler's result decides what happens to its message:
//
//   - nil acknowledges it.
//   - Poison(err) moves it to dead.<subject>; it is acknowledged after that copy is stored.
//   - Transient(err) runs the handler again without a redelivery, with backoff; after that it counts as any other error.
//   - RetryAfter(err, d) redelivers it after d, which does not count as a failure.
//   - Any other error redelivers it after the subscriber's NakDelay or the message's own (SetNakDelay), until
//     the Router's MaxDeliveries is reached, after which it is poison.
//
// Delivery is at least once. With Concurrency 1 and one subscriber, messages come in stream order until one of them
// is redelivered. With MaxAckPending 1 on the consumer they come strictly in order, whatever fails and however many
// subscribers there are.
//
// Request and Reply implement commands with a response: the command goes through a work-queue stream, the response
// over core NATS.
package bus
