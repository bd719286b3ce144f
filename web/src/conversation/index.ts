export { ApprovalCard } from "./approval";
export { Conversation } from "./conversation";
