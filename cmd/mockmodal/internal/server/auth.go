package server

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"slices"
	"strings"
	"time"

	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	authTokenLife   = 20 * time.Minute // of the tokens from AuthTokenGet
	routerTokenLife = 30 * time.Minute // of the tokens for a task's command router
)

// claims are the claims of a JSON Web Token that the server issues.
type claims struct {
	Subject string `json:"sub"` // "auth", or the task
	Expires int64  `json:"exp"` // Unix seconds
}

// sign returns a JSON Web Token for a subject that is valid for the given time.
func (s *Server) sign(subject string, life time.Duration) string {
	encode := base64.RawURLEncoding.EncodeToString
	signed := encode([]byte(`{"alg":"HS256","typ":"JWT"}`)) + "." + encode(marshal(claims{subject, time.Now().Add(life).Unix()}))
	return signed + "." + encode(s.mac(signed))
}

// mac returns the HMAC-SHA-256 of the signed part of a token.
func (s *Server) mac(signed string) []byte {
	hash := hmac.New(sha256.New, s.secret)
	hash.Write([]byte(signed))
	return hash.Sum(nil)
}

// subject returns the subject of a valid token.
func (s *Server) subject(token string) (string, error) {
	refused := status.Error(codes.Unauthenticated, "token is invalid or expired")
	dot := strings.LastIndexByte(token, '.')
	if dot < 0 {
		return "", refused
	}
	sum, err := base64.RawURLEncoding.DecodeString(token[dot+1:])
	if err != nil || !hmac.Equal(sum, s.mac(token[:dot])) {
		return "", refused
	}
	_, payload, _ := strings.Cut(token[:dot], ".")
	raw, err := base64.RawURLEncoding.DecodeString(payload)
	if err != nil {
		return "", refused
	}
	var c claims
	if err := json.Unmarshal(raw, &c); err != nil || c.Expires <= time.Now().Unix() {
		return "", refused
	}
	return c.Subject, nil
}

// authenticate checks the headers of a call. The SDK sends the token from
// AuthTokenGet with unary calls alone.
func (s *Server) authenticate(ctx context.Context, fullMethod string, isStream bool) error {
	headers, _ := metadata.FromIncomingContext(ctx)
	header := func(name string) string { return lastHeader(headers, name) }
	if strings.HasPrefix(fullMethod, "/"+pb.TaskCommandRouter_ServiceDesc.ServiceName+"/") {
		_, err := s.taskOf(ctx)
		return err
	}
	id, secret := header("x-modal-token-id"), header("x-modal-token-secret")
	if id == "" || secret == "" {
		return status.Error(codes.Unauthenticated, "Token missing. Could not authenticate client.")
	}
	if !slices.Contains(s.cfg.Tokens, id+":"+secret) {
		return status.Error(codes.Unauthenticated, "Token validation failed. Could not authenticate client.")
	}
	for _, name := range []string{"x-modal-client-type", "x-modal-client-version"} {
		if header(name) == "" {
			return status.Errorf(codes.InvalidArgument, "header %s is missing", name)
		}
	}
	if isStream || fullMethod == pb.ModalClient_AuthTokenGet_FullMethodName {
		return nil
	}
	if subject, err := s.subject(header("x-modal-auth-token")); err != nil || subject != "auth" {
		return status.Error(codes.Unauthenticated, "auth token is missing, invalid or expired")
	}
	return nil
}

// lastHeader returns the last value of a header. The SDK's AuthTokenGet inherits the
// headers of the call that needs the token, so it sends some twice.
func lastHeader(headers metadata.MD, name string) string {
	values := headers.Get(name)
	if len(values) == 0 {
		return ""
	}
	return values[len(values)-1]
}

// taskOf returns the id of the task to which the token of a call of the command router belongs.
func (s *Server) taskOf(ctx context.Context) (string, error) {
	headers, _ := metadata.FromIncomingContext(ctx)
	token, ok := strings.CutPrefix(lastHeader(headers, "authorization"), "Bearer ")
	if !ok {
		return "", status.Error(codes.Unauthenticated, "authorization header is missing")
	}
	return s.subject(token)
}

// routerURL returns the address of the command router, with the scheme https, which the SDK requires. The SDK connects
// to a loopback address without TLS nevertheless.
func (s *Server) routerURL() string { return "https://" + s.port.address.String() }
