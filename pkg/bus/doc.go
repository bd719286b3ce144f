// Package bus is watermill's Publisher and Subscriber on NATS JetStream, and the Router that command and job handlers run on.
//
// A topic is a subject. Publisher returns when JetStream has stored the message. Subscriber reads a durable pull consumer: it asks for a
// message only when a slot is free, so that none waits in a buffer while its AckWait runs, and tells the server every third of
// AckWait that a handler is still at work, so that a handler may take an hour.
//
// Handlers are registered with Router.Handle and nowhere else: Subscribe refuses a caller that is not a Router, and a handler can
// make sure with Routed. The Router brings recovery, correlation, deadlines, timeouts, retries and the dead-letter subject. A handler's
// return value decides what becomes of its message:
//
//   - nil acknowledges it.
//   - Poison(err) moves it to dead.<subject>; it is taken off its stream after that copy is stored.
//   - Transient(err) runs the handler again in place, with backoff; then it counts as any other error.
//   - Later(err, d) gives it back, to be delivered again after d: that is no failure.
//   - Any other error gives it back, to be delivered again after the subscriber's NakDelay or the message's own (SetNakDelay), until
//     the Router's MaxDeliveries is reached, which is poison.
//
// Delivery is at least once. Order: with Concurrency 1 and one subscriber, messages come in stream order until one of them has to be
// delivered again; with MaxAckPending 1 on the consumer they come strictly in order, whatever fails and however many subscribers there are.
//
// Request and Reply are commands with an answer: the command goes through a work-queue stream, the answer over core NATS.
package bus
