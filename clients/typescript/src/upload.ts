/** Whether requests report the progress of their bodies by XMLHttpRequest: browsers stream bodies of fetch over HTTP/2 only, or not at all. */
export const hasUploadProgress = "XMLHttpRequest" in globalThis;

/** Sends a request by XMLHttpRequest, which reports how much of the body was sent. */
export async function uploadWithProgress(url: string, init: RequestInit, report: (sent: number) => void): Promise<Response> {
  init.signal?.throwIfAborted();
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    const abort = () => request.abort();
    request.open(init.method!, url);
    request.withCredentials = init.credentials === "include";
    request.responseType = "blob";
    (init.headers as Headers).forEach((value, name) => request.setRequestHeader(name, value));
    request.upload.onprogress = ({ loaded }) => report(loaded);
    request.onload = () => {
      const headers = new Headers();
      for (const line of request.getAllResponseHeaders().trim().split("\r\n")) {
        const colon = line.indexOf(":");
        if (colon > 0) headers.append(line.slice(0, colon), line.slice(colon + 1).trim());
      }
      resolve(new Response(request.status === 204 ? null : (request.response as Blob), { status: request.status, headers }));
    };
    request.onerror = () => reject(new TypeError("the upload failed"));
    request.onabort = () => reject(new TypeError("the upload was aborted"));
    request.onloadend = () => init.signal?.removeEventListener("abort", abort);
    init.signal?.addEventListener("abort", abort);
    request.send(init.body as Blob);
  });
}
