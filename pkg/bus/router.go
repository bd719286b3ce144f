package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
)

const (
	defaultHandlerTimeout        = 30 * time.Second
	defaultMaxRetries            = 3
	defaultRetryInterval         = 100 * time.Millisecond
	defaultMaxRetryInterval      = 5 * time.Second
	defaultMaxDeliveries         = 10
	defaultRouterShutdownTimeout = 30 * time.Second
)

// RouterConfig configures a Router. DeadLetter is required; everything else may be zero.
type RouterConfig struct {
	// DeadLetter stores messages that handlers give up, under topology.DeadSubject of their subject. Use a Publisher with
	// Deduplicate, so that a repeated message is stored once.
	DeadLetter message.Publisher
	// Timeout limits the handling of one delivery, including retries, through its context; 0 means 30 s, negative
	// no limit.
	Timeout time.Duration
	// MaxRetries is the number of times that a handler is run again for an error marked Transient; 0 means 3, negative never.
	MaxRetries int
	// RetryInterval is the pause before the first retry, doubled for each further one up to RetryMax; 0 means 100 ms and 5 s.
	RetryInterval, RetryMax time.Duration
	// MaxDeliveries is the number of deliveries after which a message counts as poison; 0 means 10, negative no
	// limit.
	MaxDeliveries int
	// CloseTimeout is the time that Run waits for handlers at its end; 0 means 30 s. It should exceed the Subscribers'
	// own.
	CloseTimeout time.Duration
	// Clock decides whether a message's time to live has passed; nil means Now, for handlers on the server's own
	// host.
	Clock *Clock
	// Now returns the time for dead letters; nil means time.Now.
	Now func() time.Time
	// Logger may be nil.
	Logger *slog.Logger
}

func (c *RouterConfig) validate() error {
	if c.DeadLetter == nil {
		return errors.New("bus: RouterConfig.DeadLetter is required")
	}
	for name, d := range map[string]time.Duration{"RetryInterval": c.RetryInterval, "RetryMax": c.RetryMax, "CloseTimeout": c.CloseTimeout} {
		if d < 0 {
			return fmt.Errorf("bus: RouterConfig.%s is %s, it cannot be negative", name, d)
		}
	}
	if c.Timeout == 0 {
		c.Timeout = defaultHandlerTimeout
	}
	if c.MaxRetries == 0 {
		c.MaxRetries = defaultMaxRetries
	}
	if c.RetryInterval == 0 {
		c.RetryInterval = defaultRetryInterval
	}
	if c.RetryMax == 0 {
		c.RetryMax = max(defaultMaxRetryInterval, c.RetryInterval)
	}
	if c.RetryMax < c.RetryInterval {
		return fmt.Errorf("bus: RouterConfig.RetryMax is %s, less than RetryInterval, which is %s", c.RetryMax, c.RetryInterval)
	}
	if c.MaxDeliveries == 0 {
		c.MaxDeliveries = defaultMaxDeliveries
	}
	if c.CloseTimeout == 0 {
		c.CloseTimeout = defaultRouterShutdownTimeout
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

// HandlerFunc handles one message; the package comment defines what its result means. ctx ends at the timeout, and
// when the subscriber no longer waits during its shutdown (see Draining).
type HandlerFunc func(ctx context.Context, msg *message.Message) error

// HandlerOption overrides the Router's configuration for one handler.
type HandlerOption func(*RouterConfig)

// WithTimeout overrides RouterConfig.Timeout; negative means no limit, for jobs of unlimited duration.
func WithTimeout(d time.Duration) HandlerOption {
	return func(c *RouterConfig) { c.Timeout = d }
}

// WithMaxDeliveries overrides RouterConfig.MaxDeliveries; negative means no limit, for jobs that are regularly
// redelivered.
func WithMaxDeliveries(n int) HandlerOption {
	return func(c *RouterConfig) { c.MaxDeliveries = n }
}

// Router runs handlers on watermill's Router. Register them with Handle, then call Run once.
type Router struct {
	cfg    RouterConfig
	router *message.Router
	names  map[string]bool
	// initialize creates the durables. They all come first, because watermill's Router cannot undo a start that
	// failed half way.
	initialize []func(context.Context) error
}

// NewRouter returns a Router, or an error that names the invalid setting.
func NewRouter(cfg RouterConfig) (*Router, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	// The Info messages of watermill only concern its developers.
	logger := watermill.NewSlogLoggerWithLevelMapping(cfg.Logger, map[slog.Level]slog.Level{slog.LevelInfo: slog.LevelDebug})
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: cfg.CloseTimeout}, logger)
	if err != nil {
		return nil, fmt.Errorf("bus: create router: %w", err)
	}
	return &Router{cfg: cfg, router: router, names: map[string]bool{}}, nil
}

// Handle registers fn for the messages of topic. It must be called before Run. Handlers can be
// registered here only: a Subscriber delivers messages only to a Router, which marks the context for RequireRouted. name must be unique in the
// Router; it appears in logs and dead letters.
func (r *Router) Handle(name, topic string, subscriber message.Subscriber, fn HandlerFunc, options ...HandlerOption) error {
	switch {
	case name == "":
		return errors.New("bus: a handler needs a name")
	case subscriber == nil || fn == nil:
		return fmt.Errorf("bus: handler %s needs a subscriber and a function", name)
	case r.names[name]:
		return fmt.Errorf("bus: handler %s is already registered", name)
	}
	if err := CheckFilter(topic); err != nil {
		return fmt.Errorf("handler %s: %w", name, err)
	}
	cfg := r.cfg
	for _, option := range options {
		option(&cfg)
	}
	if err := cfg.validate(); err != nil {
		return fmt.Errorf("handler %s: %w", name, err)
	}
	r.names[name] = true
	handler := r.router.AddConsumerHandler(name, topic, subscriber, func(msg *message.Message) error {
		return fn(msg.Context(), msg)
	})
	if s, ok := subscriber.(*Subscriber); ok {
		r.initialize = append(r.initialize, func(ctx context.Context) error { return s.createDurable(ctx, topic) })
	}
	// The first middleware is the outermost. deadLetterMiddleware decides last, also about errors that a panic or the timeout
	// caused. Recoverer is inside the others, so that they never see a panic.
	handler.AddMiddleware(retryAfterMiddleware(name, cfg), correlationMiddleware(), deadLetterMiddleware(name, cfg), deadlineMiddleware(name, cfg))
	if cfg.Timeout > 0 {
		handler.AddMiddleware(middleware.Timeout(cfg.Timeout))
	}
	handler.AddMiddleware(retryTransientMiddleware(name, cfg), middleware.Recoverer, markRoutedMiddleware())
	return nil
}

// Run subscribes all handlers and blocks until ctx ends or every subscription has ended, then waits for the running
// handlers. The end of ctx is not an error. While NATS does not respond or a stream does not exist, Run waits.
func (r *Router) Run(ctx context.Context) error {
	if len(r.names) == 0 {
		return errors.New("bus: the router has no handlers: register one with Handle")
	}
	for _, initialize := range r.initialize {
		if err := initialize(ctx); err != nil {
			return nilIfEnded(ctx, err)
		}
	}
	err := r.router.Run(context.WithValue(ctx, routerKey{}, r))
	if err != nil {
		// A failed subscription leaves the earlier ones running.
		return errors.Join(nilIfEnded(ctx, err), r.router.Close())
	}
	if ctx.Err() == nil {
		return fmt.Errorf("bus: all subscriptions ended: %w", ErrUnavailable)
	}
	return nil
}

// nilIfEnded returns nil if ctx has ended, because the end of ctx is not a failure of Run, and err otherwise.
func nilIfEnded(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("bus: run router: %w", err)
}

// Running returns a channel that is closed when all handlers are subscribed.
func (r *Router) Running() <-chan struct{} { return r.router.Running() }
