import sys, torch, flashgen, itertools
torch.manual_seed(0)
def ref(q,k,v,do,dl,causal,dt):
    q,k,v,do=[x.to(dt).transpose(1,2) for x in (q,k,v,do)]
    g=q.shape[1]//k.shape[1]
    q,k,v=[x.detach().requires_grad_() for x in (q,k,v)]
    kk,vv=k.repeat_interleave(g,1),v.repeat_interleave(g,1)
    s=q@kk.transpose(2,3)*q.shape[-1]**-.5
    sq,sk=s.shape[2:]
    if causal: s=s.masked_fill(~torch.ones(sq,sk,dtype=torch.bool,device=s.device).tril(sk-sq),float('-inf'))
    lse=torch.logsumexp(s.double() if dt==torch.float64 else s.float(),-1)
    p=torch.exp(s-torch.where(lse==-float('inf'),0.,lse)[...,None].to(s.dtype))
    o=p@vv
    gq=torch.autograd.grad((o,lse),(q,k,v),(do,dl.to(lse.dtype)))
    return [x.transpose(1,2) for x in (o,*gq)]+[lse]
for det in (False,True):
 for dt,D,c,(sq,sk) in itertools.product((torch.bfloat16,torch.float16),(40,64,128,256),(False,True),((64,128),(113,203),(512,256),(1024,1023))):
  for (h,hk) in ((4,2),):
    q=torch.randn(2,sq,h,D,device='cuda',dtype=dt).requires_grad_(); k=torch.randn(2,sk,hk,D,device='cuda',dtype=dt).requires_grad_(); v=torch.randn(2,sk,hk,D,device='cuda',dtype=dt).requires_grad_()
    kern=flashgen.compile(D,c,dtype=dt,deterministic=det)
    o,lse=kern(q,k,v,return_lse=True); torch.cuda.synchronize()
    do=torch.randn_like(o); dl=torch.randn_like(lse)
    if c and sq>sk: dl[:,:,:sq-sk]=0
    out=[o,*torch.autograd.grad((o,lse),(q,k,v),(do,dl)),lse]; torch.cuda.synchronize()
    r=ref(q,k,v,do,dl,c,torch.float64); 
    m=torch.isfinite(r[4])
    e=[((a.double()-b).norm()/b.norm()).item() if i<4 else (a.double()-b)[m].abs().max().item() for i,(a,b) in enumerate(zip(out,r))]
    bad=any(x!=x or x>6e-3 for x in e[:4]) or e[4]>1e-3
    print('BAD' if bad else 'ok', det,dt,D,c,sq,sk,['%.1e'%x for x in e],flush=True)
