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
	authTokenLifetime   = 20 * time.Minute // lifetime of the tokens that AuthTokenGet returns
	routerTokenLifetime = 30 * time.Minute // lifetime of the tokens for the command router of a task
)

// tokenClaims are the claims of a JSON Web Token that the server issues.
type tokenClaims struct {
	Subject string `json:"sub"` // "auth", or the task
	Expires int64  `json:"exp"` // Unix seconds
}

// signToken returns a JSON Web Token for a subject that is valid for the given time.
func (s *Server) signToken(subject string, life time.Duration) string {
	encode := base64.RawURLEncoding.EncodeToString
	signed := encode([]byte(`{"alg":"HS256","typ":"JWT"}`)) + "." + encode(mustMarshal(tokenClaims{subject, time.Now().Add(life).Unix()}))
	return signed + "." + encode(s.tokenSignature(signed))
}

// tokenSignature returns the signature of a JSON Web Token: the HMAC-SHA-256 of its first two parts.
func (s *Server) tokenSignature(signed string) []byte {
	hash := hmac.New(sha256.New, s.secret)
	hash.Write([]byte(signed))
	return hash.Sum(nil)
}

// verifyToken returns the subject of a token that the server has issued. It returns an error if the token's signature
// is wrong or the token has expired.
func (s *Server) verifyToken(token string) (string, error) {
	refused := status.Error(codes.Unauthenticated, "token is invalid or expired")
	dot := strings.LastIndexByte(token, '.')
	if dot < 0 {
		return "", refused
	}
	sum, err := base64.RawURLEncoding.DecodeString(token[dot+1:])
	if err != nil || !hmac.Equal(sum, s.tokenSignature(token[:dot])) {
		return "", refused
	}
	_, payload, _ := strings.Cut(token[:dot], ".")
	raw, err := base64.RawURLEncoding.DecodeString(payload)
	if err != nil {
		return "", refused
	}
	var c tokenClaims
	if err := json.Unmarshal(raw, &c); err != nil || c.Expires <= time.Now().Unix() {
		return "", refused
	}
	return c.Subject, nil
}

// authenticate checks the credentials in the headers of a gRPC call. Only unary calls must have the token from
// AuthTokenGet, because the SDK sends it with no others.
func (s *Server) authenticate(ctx context.Context, fullMethod string, isStream bool) error {
	headers, _ := metadata.FromIncomingContext(ctx)
	header := func(name string) string { return lastHeader(headers, name) }
	if strings.HasPrefix(fullMethod, "/"+pb.TaskCommandRouter_ServiceDesc.ServiceName+"/") {
		_, err := s.authorizedTask(ctx)
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
	if subject, err := s.verifyToken(header("x-modal-auth-token")); err != nil || subject != "auth" {
		return status.Error(codes.Unauthenticated, "auth token is missing, invalid or expired")
	}
	return nil
}

// lastHeader returns the last value of a header. The headers of the SDK's AuthTokenGet are appended to those of the
// call that needs the token, so some are sent twice.
func lastHeader(headers metadata.MD, name string) string {
	values := headers.Get(name)
	if len(values) == 0 {
		return ""
	}
	return values[len(values)-1]
}

// authorizedTask returns the id of the task for which the token of a call to the command router was issued.
func (s *Server) authorizedTask(ctx context.Context) (string, error) {
	headers, _ := metadata.FromIncomingContext(ctx)
	token, ok := strings.CutPrefix(lastHeader(headers, "authorization"), "Bearer ")
	if !ok {
		return "", status.Error(codes.Unauthenticated, "authorization header is missing")
	}
	return s.verifyToken(token)
}

// routerURL returns the address of the command router. Its scheme is https, as the SDK requires, although the SDK
// connects to loopback addresses without TLS.
func (s *Server) routerURL() string { return "https://" + s.port.address.String() }
