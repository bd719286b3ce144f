package natsserver

import (
	"fmt"
	"log/slog"
	"strings"
)

// logAdapter writes the log of the NATS server to slog. It keeps the first fatal message, with which the server reports
// why it failed to start.
type logAdapter struct {
	logger *slog.Logger
	fatal  chan string
}

func (l *logAdapter) firstFatal() string {
	select {
	case reason := <-l.fatal:
		return reason
	default:
		return ""
	}
}

func (l *logAdapter) Fatalf(format string, v ...any) {
	reason := fmt.Sprintf(format, v...)
	l.logger.Error(reason)
	select {
	case l.fatal <- reason:
	default:
	}
}

func (l *logAdapter) Errorf(format string, v ...any) { l.logger.Error(fmt.Sprintf(format, v...)) }

// Warnf logs a warning of the NATS server, but drops the warning about plain-text passwords: the passwords of the
// embedded server are random, created at each start, and never written into a configuration file.
func (l *logAdapter) Warnf(format string, v ...any) {
	if strings.HasPrefix(format, "Plaintext passwords detected") {
		return
	}
	l.logger.Warn(fmt.Sprintf(format, v...))
}
func (l *logAdapter) Noticef(format string, v ...any) { l.logger.Debug(fmt.Sprintf(format, v...)) }
func (l *logAdapter) Debugf(format string, v ...any)  { l.logger.Debug(fmt.Sprintf(format, v...)) }
func (l *logAdapter) Tracef(format string, v ...any)  { l.logger.Debug(fmt.Sprintf(format, v...)) }
