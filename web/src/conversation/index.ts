export { ApprovalCard, type Approval } from "./approval";
export { Conversation } from "./conversation";
export { transcriptMarkdown } from "./transcript";
