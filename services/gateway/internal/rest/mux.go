package rest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/services/gateway/internal/api"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

const (
	// maxBodyBytes is the largest body of a request without files, in bytes: a message of 1 MiB with every byte escaped,
	// plus its metadata; or a definition of 4 MiB.
	maxBodyBytes = 8 << 20
	// maxDrainBytes bounds how much of a body that is too large is read and discarded.
	maxDrainBytes = 64 << 20
	// responseTimeout bounds how long a client may take to receive a response.
	responseTimeout = 60 * time.Second
)

// route is a method of spool.v1 that has a REST binding.
type route struct {
	method  string // "/spool.v1.Sessions/GetSession"
	path    string // "/api/sessions/{session_id}"
	request protoreflect.MessageDescriptor
	body    bool // whether the method has a request body
	files   bool // whether the body may contain files
}

// workspaceFilesField is the name of the message field that contains files for a workspace.
const workspaceFilesField = "workspace_files"

// restRoutes returns the methods that have a REST binding, by HTTP method and pattern.
func restRoutes() map[string]route {
	out := map[string]route{}
	services := spoolv1.File_spool_v1_spool_proto.Services()
	for i := range services.Len() {
		methods := services.Get(i).Methods()
		for j := range methods.Len() {
			m := methods.Get(j)
			rule, ok := proto.GetExtension(m.Options(), annotations.E_Http).(*annotations.HttpRule)
			if !ok || rule == nil {
				continue
			}
			verb, path := httpBinding(rule)
			out[verb+" "+path] = route{
				method: fmt.Sprintf("/%s/%s", services.Get(i).FullName(), m.Name()), path: path, request: m.Input(), body: rule.GetBody() != "",
				files: m.Input().Fields().ByName(workspaceFilesField) != nil,
			}
		}
	}
	return out
}

// httpBinding returns the HTTP method and the path pattern of a method's google.api.http annotation.
func httpBinding(rule *annotations.HttpRule) (verb, path string) {
	switch p := rule.GetPattern().(type) {
	case *annotations.HttpRule_Get:
		return http.MethodGet, p.Get
	case *annotations.HttpRule_Post:
		return http.MethodPost, p.Post
	case *annotations.HttpRule_Put:
		return http.MethodPut, p.Put
	case *annotations.HttpRule_Patch:
		return http.MethodPatch, p.Patch
	case *annotations.HttpRule_Delete:
		return http.MethodDelete, p.Delete
	}
	panic(fmt.Sprintf("rest: a binding of kind %T", rule.GetPattern()))
}

// newMux returns a handler for the REST bindings of spool.v1.
func (h *Handler) newMux() (http.Handler, error) {
	table := restRoutes()
	mux := runtime.NewServeMux(
		runtime.WithMarshalerOption(runtime.MIMEWildcard, codec{}),
		runtime.WithIncomingHeaderMatcher(func(name string) (string, bool) {
			return api.IdempotencyHeader, strings.EqualFold(name, api.IdempotencyHeader)
		}),
		runtime.WithOutgoingHeaderMatcher(func(string) (string, bool) { return "", false }),
		runtime.WithDisablePathLengthFallback(),
		runtime.WithDisableHTTPMethodOverride(),
		runtime.WithWriteContentLength(),
		runtime.WithErrorHandler(func(_ context.Context, _ *runtime.ServeMux, _ runtime.Marshaler, w http.ResponseWriter, r *http.Request, err error) {
			if b, ok := r.Body.(*requestBody); ok && b.err != nil {
				err = fieldProblem(b.err)
			}
			h.writeProblem(asStatusRecorder(w), r, err)
		}),
		runtime.WithRoutingErrorHandler(func(_ context.Context, _ *runtime.ServeMux, _ runtime.Marshaler, w http.ResponseWriter, r *http.Request, status int) {
			err := routeNotFound(r)
			if status == http.StatusMethodNotAllowed {
				err = methodNotAllowed(r)
			}
			h.writeProblem(asStatusRecorder(w), r, err)
		}),
		runtime.WithForwardResponseOption(func(ctx context.Context, w http.ResponseWriter, response proto.Message) error {
			if method, ok := runtime.RPCMethod(ctx); ok {
				w.Header().Set("Cache-Control", "no-store")
				if status := spoolv1.ResponseStatus(method, response); status != http.StatusOK {
					w.WriteHeader(status)
				}
			}
			return nil
		}),
		runtime.WithMiddlewares(func(next runtime.HandlerFunc) runtime.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request, params map[string]string) {
				h.validateAndCall(table, next, w, r, params)
			}
		}),
	)
	ctx := context.Background() // used only for the registration
	return mux, errors.Join(
		spoolv1.RegisterSessionsHandlerServer(ctx, mux, h.cfg.API),
		spoolv1.RegisterExecutionsHandlerServer(ctx, mux, h.cfg.API),
		spoolv1.RegisterApprovalsHandlerServer(ctx, mux, h.cfg.API),
		spoolv1.RegisterEventsHandlerServer(ctx, mux, h.cfg.API),
		spoolv1.RegisterKeysHandlerServer(ctx, mux, h.cfg.API),
		spoolv1.RegisterSignInHandlerServer(ctx, mux, h.cfg.API),
		spoolv1.RegisterBudgetsHandlerServer(ctx, mux, h.cfg.API),
		spoolv1.RegisterLimitsHandlerServer(ctx, mux, h.cfg.API),
		spoolv1.RegisterDeadLettersHandlerServer(ctx, mux, h.cfg.API),
		spoolv1.RegisterAuditHandlerServer(ctx, mux, h.cfg.API),
		spoolv1.RegisterAgentsHandlerServer(ctx, mux, h.cfg.API),
		spoolv1.RegisterInstancesHandlerServer(ctx, mux, h.cfg.API),
		spoolv1.RegisterEnvironmentsHandlerServer(ctx, mux, h.cfg.API),
		spoolv1.RegisterSkillsHandlerServer(ctx, mux, h.cfg.API),
	)
}

// asStatusRecorder returns w if it is a statusRecorder, and otherwise a new statusRecorder around w.
func asStatusRecorder(w http.ResponseWriter) *statusRecorder {
	if a, ok := w.(*statusRecorder); ok {
		return a
	}
	return &statusRecorder{ResponseWriter: w}
}

// validateAndCall reads the body of a request, checks query and body, and then calls the method, so that errors name
// the invalid field. grpc-gateway alone would ignore unknown parameters.
func (h *Handler) validateAndCall(table map[string]route, next runtime.HandlerFunc, w http.ResponseWriter, r *http.Request, params map[string]string) {
	out := asStatusRecorder(w)
	pattern, _ := runtime.HTTPPattern(r.Context())
	to, ok := table[r.Method+" "+strings.ReplaceAll(pattern.String(), "=*}", "}")]
	if !ok {
		h.writeProblem(out, r, fmt.Errorf("no method of spool.v1 has the route %s %s", r.Method, pattern))
		return
	}
	out.route = to.path
	if err := auth.CheckAllowed(r.Context(), to.method); err != nil {
		h.writeProblem(out, r, err)
		return
	}
	limit := int64(maxBodyBytes)
	if to.files {
		limit = max(limit, h.cfg.MaxRequest)
	}
	body, err := readBody(out, r, limit, h.cfg.ReadTimeout)
	if err == nil && !to.body && len(body.data) > 0 {
		err = problem.Invalid("", "%s %s does not support a body", r.Method, to.path)
	}
	if err == nil {
		err = checkIdempotencyKey(r)
	}
	query := r.URL.Query()
	if err == nil {
		err = wirejson.CheckQuery(query, to.request, func(field string) bool {
			_, inPath := params[field]
			return inPath || to.body && !spoolv1.IsQueryParameter(to.request.FullName().Append(protoreflect.Name(field)))
		})
	}
	if err == nil && to.body && query.Has(waitParameter) {
		err = extendDeadlineByWait(out, query.Get(waitParameter))
	}
	if err != nil {
		h.writeProblem(out, r, fieldProblem(err))
		return
	}
	body.inPath, body.query = params, query
	r.Body = body
	next(w, r, params)
}

// waitParameter is the query parameter with which a request waits for the end of its execution.
const waitParameter = "wait"

// extendDeadlineByWait extends the time in which the response must be sent by the value text of the parameter wait.
func extendDeadlineByWait(w *statusRecorder, text string) error {
	wait, err := api.ParseWait(text)
	if err == nil && text == "" {
		err = problem.Invalid(waitParameter, "the parameter is empty: give a duration such as 30s, or leave it out")
	}
	if err != nil || wait == 0 {
		return err
	}
	w.waits = true
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(wait + responseTimeout)) // a test's recorder has no connection
	return nil
}

// checkIdempotencyKey validates the Idempotency-Key before grpc-gateway gets the request, because it silently drops a header that
// gRPC could not carry.
func checkIdempotencyKey(r *http.Request) error {
	switch keys := r.Header.Values(api.IdempotencyHeader); {
	case len(keys) == 0:
		return nil
	case len(keys) > 1:
		return problem.Invalid("Idempotency-Key", "the header is set more than once")
	default:
		return commands.CheckIdempotencyKey(keys[0])
	}
}

// fieldProblem converts an error about a field of a message to a problem that names the field.
func fieldProblem(err error) error {
	var bad *wirejson.FieldError
	if errors.As(err, &bad) {
		return problem.Invalid(bad.Field, "%s", bad.Detail)
	}
	return err
}

// requestBody is the body of a request to a method of spool.v1, in memory. grpc-gateway passes on only the text of a
// codec's error, so requestBody keeps the error itself.
type requestBody struct {
	io.Reader
	data   []byte
	inPath map[string]string // fields that the path contains
	query  url.Values        // checked parameters; those that are fields of the message are set when the body is decoded
	err    error
}

func (*requestBody) Close() error { return nil }

// readBody reads a whole body, with a limit of its size and a timeout.
func readBody(w http.ResponseWriter, r *http.Request, limit int64, timeout time.Duration) (*requestBody, error) {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(timeout)) // a test's recorder has no connection
	_ = control.SetWriteDeadline(time.Now().Add(responseTimeout))
	data, err := io.ReadAll(admissionOf(r).Reader(io.LimitReader(r.Body, limit+1)))
	var refused *problem.Error
	if errors.As(err, &refused) {
		// The connection of a client that is still sending would be reset, and the client would lose the answer.
		_, _ = io.CopyN(io.Discard, r.Body, maxDrainBytes)
		return nil, refused
	}
	if int64(len(data)) > limit {
		// The connection of a client that is still sending would be reset, and the client would lose the answer.
		_, _ = io.CopyN(io.Discard, r.Body, maxDrainBytes)
		return nil, problem.New(problem.PayloadTooLarge, "", fmt.Sprintf("the body is larger than %d bytes; a message may have %d, and send larger files with PUT /api/sessions/{id}/files/{path}", limit, api.MaxMessageBytes))
	}
	if err != nil {
		return nil, problem.Invalid("", "the body is incomplete: it ended early or took longer than %s", timeout)
	}
	_ = control.SetReadDeadline(time.Time{})
	return &requestBody{Reader: bytes.NewReader(data), data: data}, nil
}
